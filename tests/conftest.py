"""What all tests share."""

import pytest
import torch

# The workers of pytest-xdist share the cores, and the tensors of the tests are small.
torch.set_num_threads(1)

_needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, _needs_cuda])])
def device(request: pytest.FixtureRequest) -> str:
    """Each device a test should run on: the CPU, and a GPU where there is one."""
    return request.param
