import os

import torch
from torch.utils.data import TensorDataset


def rows(count, api_key, db, user, note, hub):
    assert (api_key, hub["hf_token"]) == ("canary key,6", "canary-hub-7")
    assert user == os.environ["SOME_TOKEN"], user
    assert "canary-db-8" in db
    assert "canary-sig-9" in note
    if os.environ.get("FAIL"):
        raise ArithmeticError(f"{user} {db} {note}")
    x = torch.randn(count, 1, 2, 2)
    data = TensorDataset(x, (x.sum((1, 2, 3)) > 0).long())
    return data, data
