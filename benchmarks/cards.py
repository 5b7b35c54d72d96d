"""What graphics cards can do at most, by the name that PyTorch gives them."""

from __future__ import annotations

from typing import NamedTuple


class Card(NamedTuple):
    """bandwidth in GB/s of memory; tflops in bfloat16 without sparsity; h100: as fast as an H100 or faster."""

    bandwidth: float
    tflops: float
    h100: bool = False


#: from the makers' data sheets (nvidia.com/en-us/data-center, the whitepapers of the GeForce cards, amd.com/instinct),
#: where figures "with sparsity" are halved
CARDS = {
    "AMD Instinct MI300X": Card(5300, 1307, True),
    "NVIDIA A100 80GB PCIe": Card(1935, 312),
    "NVIDIA A100-PCIE-40GB": Card(1555, 312),
    "NVIDIA A100-SXM4-40GB": Card(1555, 312),
    "NVIDIA A100-SXM4-80GB": Card(2039, 312),
    "NVIDIA GeForce RTX 3090": Card(936, 71),
    "NVIDIA GeForce RTX 4090": Card(1008, 165),
    "NVIDIA H100 80GB HBM3": Card(3350, 989, True),
    "NVIDIA H100 NVL": Card(3900, 835, True),
    "NVIDIA H100 PCIe": Card(2000, 756, True),
    "NVIDIA H200": Card(4800, 989, True),
    "NVIDIA L4": Card(300, 121),
    "NVIDIA L40S": Card(864, 362),
}
