import os
import signal
import sys
from pathlib import Path

# For the processes that tests start, too: several threads in each wait for a core that another one has, and
# where tests run on all cores a training then takes seven times the processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # so that tests can import `references`
torch.set_num_threads(1)
# Jobs in the background of a shell ignore it, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def wilds_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with imitations of the six datasets of WILDS."""
    from imitations.wilds import WILDS, maker

    root = tmp_path_factory.mktemp("wilds")
    for name in WILDS:
        maker(name)(root)
    return root
