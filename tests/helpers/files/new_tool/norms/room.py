"""norms.every, mode=norms and the command norms."""

from dataclasses import dataclass

from runner.core import Command, ConfigError, Mode, Room, errors


@dataclass(frozen=True)
class NormsSpec:
    """The largest weight of a run.

    Attributes:
        every: steps between two looks; null for none.
    """

    every: int | None = None

    def problems(self, spec):
        yield from errors.count_problems("norms", self, ("every",))


class Norms(Mode):
    name = "norms"
    needs_data = False

    def run(self, context, saved):
        raise RuntimeError("no luck")


class Watch:
    def __init__(self, run):
        self.run = run

    def begin_steps(self, state, batch=None):
        self.run.say(f"norms begins with a batch of {len(batch()[1])}")

    def explain(self, error):
        return ConfigError(f"norms: {error}. Type norms.every=2.") if "luck" in str(error) else None


def callbacks(run, state):
    from runner.norms.watch import LargestWeight

    every = run.spec.section(NormsSpec).every
    if every:
        yield LargestWeight(state, every, run.say)


def say_words(words, values):
    print(f"norms of {words[0]}, {values}")
    return 3


ROOM = Room(
    sections={"norms": NormsSpec},
    modes=(Norms(),),
    commands=(
        Command(
            name="norms",
            summary="how large weights are",
            description="Prints them.",
            run=say_words,
            options={"top=<number>": "how many"},
            words="<run>",
            words_meaning="a run",
            words_allowed="a run",
        ),
    ),
    callbacks=callbacks,
    watch=Watch,
)
