"""A server that runs jobs in several processes: requests on stdin, an exit status each on stdout.

It is started once: its processes are forked from it, and need not import torch again.
"""

import gc
import inspect
import json
import os
import signal
import socket
import sys
import traceback
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from composition_cache import cache_compositions
from hydra import compose, initialize_config_module

from runner.config.hydra_plugins import VERSION_BASE
from runner.config.overrides import rewrite_arguments
from runner.config.resolve import register_schema, resolve_spec
from runner.core.base import torchrun
from runner.core.base.errors import RunnerError
from runner.core.config.invocation import Invocation
from runner.core.run.run import run_spec
from runner.output.console import plain_console
from runner.rooms import install_rooms

# What a run imports when it needs it; each process would import it anew.
PRELOADED = ("torch._dynamo", "torch.distributed.fsdp")
MODEL_LIBRARIES = {"model=hf": "transformers.modeling_utils", "model=timm": "timm"}
ROOT = Path(__file__).parents[2]
IMPORTED = "imported-{}.txt"
"""Where a process writes what it has imported, by its rank."""
RANK_JOURNAL = "tracking._target_=runner.core.record.tracker.ProcessJournal"


@contextmanager
def count_collectives(folder, rank):
    """Write down how often FSDP reduces gradients, and the bytes of what it gathers and reduces.

    A gather counts the gathered tensor, a reduction the tensor before it is scattered.
    """
    found = {"reductions": 0, "gathered": 0, "reduced": 0}

    def note(kind, tensor):
        found[kind] += tensor.numel() * tensor.element_size()
        found["reductions"] += kind == "reduced"
        (folder / f"reductions-{rank}.txt").write_text(str(found["reductions"]))
        (folder / f"bytes-{rank}.json").write_text(json.dumps(found))

    with ExitStack() as patches:
        for kind, names, which in (
            # The first names are those since torch 2.15.
            ("gathered", ("all_gather_single", "all_gather_into_tensor"), "output"),
            ("reduced", ("reduce_scatter_single", "reduce_scatter_tensor"), "input"),
        ):
            name = next(name for name in names if hasattr(dist, name))
            patches.enter_context(
                mock.patch.object(dist, name, noted(getattr(dist, name), kind, which, note))
            )
        yield


def noted(collective, kind, which, note):
    """Return a collective that notes its tensor named `output...` or `input...` first."""
    parameters = inspect.signature(collective)

    def call(*args, **how):
        bound = parameters.bind(*args, **how).arguments
        note(kind, next(value for key, value in bound.items() if key.startswith(which)))
        return collective(*args, **how)

    return call


def compose_spec(overrides):
    with initialize_config_module("runner.conf", **VERSION_BASE):
        typed = rewrite_arguments(["tracking=none", RANK_JOURNAL, *overrides])
        return resolve_spec(compose("config", typed))


def run_job(folder, spec, overrides):
    """Run a spec in a folder; a refusal or an exception is written there."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = torchrun.process_rank().index
    try:
        with count_collectives(folder, rank):
            run_spec(spec, folder, Invocation(overrides=tuple(overrides)), plain_console())
    except RunnerError as error:
        (folder / f"refused-{rank}.txt").write_text(str(error))
    except Exception:
        (folder / f"failed-{rank}.txt").write_text(traceback.format_exc())
        raise


def names_of_installed_modules():
    """Return the names of the imported modules of libraries and of the runner, in order."""
    places = (sys.prefix, str(ROOT / "runner"))
    return [
        name
        for name, module in list(sys.modules.items())
        if (getattr(module, "__file__", None) or "").startswith(places)
    ]


def import_what_processes_imported(request):
    """Import the modules that the processes of a request needed: the next ones inherit them."""
    for rank in range(request["processes"]):
        path = Path(request["folder"], IMPORTED.format(rank))
        names = path.read_text().split() if path.exists() else []
        for name in names:
            with suppress(Exception):
                import_module(name)
    gc.freeze()  # each run collects, which would look through all of it


def fork_process(request, specs, rank, port):
    """Fork a process that runs the jobs, with the environment that torchrun would give it."""
    if child := os.fork():
        return child
    status = 1
    known = set(names_of_installed_modules())
    try:
        os.chdir(request["folder"])
        output = os.open(f"output-{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        if request["processes"] > 1:
            os.environ.update(
                RANK=str(rank),
                WORLD_SIZE=str(request["processes"]),
                LOCAL_RANK=str(rank),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
        for (name, overrides), spec in zip(request["jobs"].items(), specs, strict=True):
            run_job(Path(name), spec, overrides)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        new = [name for name in names_of_installed_modules() if name not in known]
        Path(request["folder"], IMPORTED.format(rank)).write_text("\n".join(new))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve(request):
    """Return 0 where every process ran every job, else 1."""
    for overrides in request["jobs"].values():
        for typed in overrides:
            if typed in MODEL_LIBRARIES:
                import_module(MODEL_LIBRARIES[typed])
            key, _, target = typed.partition("=")
            if key.endswith("._target_"):
                import_module(target.rpartition(".")[0])
    # Here, not in each process: a spec takes a quarter of a second.
    specs = [compose_spec(overrides) for overrides in request["jobs"].values()]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = {fork_process(request, specs, rank, port) for rank in range(request["processes"])}
    failed = False
    while children:
        child, status = os.wait()
        children.discard(child)
        if status and not failed:  # the others would wait for it
            failed = True
            for other in children:
                os.kill(other, signal.SIGKILL)
    import_what_processes_imported(request)
    return int(failed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    install_rooms()
    register_schema()
    for module in PRELOADED:
        import_module(module)
    gc.freeze()  # each run collects, which would look through all of it
    with pytest.MonkeyPatch.context() as patch:
        cache_compositions(patch)
        for line in sys.stdin:
            print(serve(json.loads(line)), flush=True)
