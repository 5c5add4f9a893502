import os
import sys
from pathlib import Path

# For the processes that tests start, too: several threads in each wait for a core that another one has, and
# where tests run on all cores a training then takes seven times the processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

sys.path.insert(0, str(Path(__file__).parent))  # so that tests can import `references`
torch.set_num_threads(1)
