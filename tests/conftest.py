import os

# Before any import of a library that reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("FORCE_COLOR", None)

import pytest
import torch

torch.set_num_threads(1)  # tests are small, and processes run them side by side


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device there is, so that one command tests a GPU machine too."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def poisoned_empty():
    """torch.empty and its kin hand out NaN, so that reading what nothing wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = False  # or convolutions round where GEMMs do not
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
