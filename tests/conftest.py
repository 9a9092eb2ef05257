"""Set up before anything of ours is imported: every call into `ops` is checked against the shapes it declares."""

import os
import random

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded, and what is not there is not waited for

import jaxtyping
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

jaxtyping.install_import_hook("dressage.ops", "beartype.beartype")

# Several test processes share the cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte; token 0 ends a response, token 1 pads."""
    from dressage.models.tiny import tiny_tokenizer

    return tiny_tokenizer()
