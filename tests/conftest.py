import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # so that tests can import `references`
torch.set_num_threads(1)
