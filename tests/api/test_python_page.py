"""The code of docs/python.md runs, block after block, with one seed and without MLflow."""

import re


def test_every_block_runs(root, main):
    text = (root / "docs" / "python.md").read_text()
    for seeds in ('"seed=0,1,2"', '"advise.seeds=3"'):
        assert seeds in text
        text = text.replace(seeds, seeds.replace("0,1,2", "0") + ', "tracking=none"')
    text = text.replace("advise.steps=20", "advise.steps=4")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 6
    namespace = {"__name__": "__main__"}
    for block in blocks:
        exec(block, namespace)
    assert namespace["advice"].recommendation is not None
    assert len(namespace["sweep"].runs) == 3
    assert namespace["newest"].conclusion == namespace["sweep"].conclusion
