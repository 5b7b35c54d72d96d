"""Lightning Fabric, imported without what it would load for one version number.

Fabric asks for the version of torchmetrics by importing it where it is installed, and torchmetrics imports
transformers, scipy and matplotlib: seconds at the start of every training. An empty module stands in for it meanwhile,
and the version is then read from the installed package's metadata.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

_stands_in = "torchmetrics" not in sys.modules and find_spec("torchmetrics") is not None
if _stands_in:
    sys.modules["torchmetrics"] = ModuleType("torchmetrics")
try:
    from lightning_fabric import Fabric, seed_everything
    from lightning_fabric.accelerators import ACCELERATOR_REGISTRY
    from lightning_fabric.strategies import ModelParallelStrategy
    from lightning_fabric.utilities.exceptions import MisconfigurationException
finally:
    if _stands_in:
        del sys.modules["torchmetrics"]

__all__ = ["ACCELERATOR_REGISTRY", "Fabric", "MisconfigurationException", "ModelParallelStrategy", "seed_everything"]
