"""The most operations in a second of devices, as their makers publish them."""

from __future__ import annotations

import re

# In 10**12 a second, by a pattern of `Device.device_kind`; the first one that fits.
# TPUs: "TPU v2" and "v3" have two JAX devices on a chip, each with half of its figure.
_TERAFLOPS = (
    (r"TPU v2", 45 / 2),
    (r"TPU v3", 123 / 2),
    (r"TPU v4 lite", 138),
    (r"TPU v4", 275),
    (r"TPU v5 ?(lite|e)", 197),
    (r"TPU v5", 459),
    (r"TPU v6 ?(lite|e)", 918),
    (r"B200", 2250),
    (r"H200", 989.4),
    (r"H100 NVL", 835.5),
    (r"H100 PCIe", 756),
    (r"H100", 989.4),
    (r"A100", 312),
    (r"A10G", None),
    (r"A10\b", 125),
    (r"A40\b", 149.7),
    (r"L40S", 362),
    (r"L4\b", 121),
    (r"V100S", 130),
    (r"V100-PCIE", 112),
    (r"V100", 125),
    (r"T4\b", 65),
)


def peak_flops(device_kind: str) -> float | None:
    """Floating-point operations in a second, at most, of one JAX device.

    Of dense products of matrices in bfloat16 (V100 and T4: float16), without sparsity,
    summed in float32. Data sheets of NVIDIA's data center products often state the
    figure with sparsity, twice as much. Sources: NVIDIA's data sheets of B200 (DGX
    B200: 36 PFLOP/s dense of 8 in FP8, half of it in bfloat16), H200, H100, A100, A10,
    A40, L40S, L4, V100, V100S and T4; Google Cloud's "TPU v2" to "TPU v6e" in its
    documentation of TPU versions.

    Args:
      device_kind: as `Device.device_kind` has it.

    Returns:
      None for CPUs, and for what is not in the table.

    >>> peak_flops("NVIDIA A100-SXM4-40GB"), peak_flops("cpu")
    (312000000000000.0, None)
    """
    for pattern, teraflops in _TERAFLOPS:
        if re.search(pattern, device_kind):
            return None if teraflops is None else teraflops * 1e12
    return None
