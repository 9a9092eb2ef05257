"""What devices can do, from their makers' data sheets, and how much of it programs reach."""

from dataclasses import dataclass, replace

from cavesson.errors import UserError
from cavesson.plan.operations import Precision


@dataclass(frozen=True)
class Device:
    """A device and the links between devices. Rates are per second, at their peak."""

    name: str
    memory: float
    """bytes"""
    half_flops: float
    """matrix products in bfloat16, dense, with float32 sums"""
    flops: float
    """matrix products in float32"""
    bandwidth: float
    """bytes between memory and cores"""
    link: float
    """bytes that a device sends to another one on its host"""
    network: float
    """bytes that a device sends to another host"""
    source: str
    per_host: int = 8
    half_share: float = 0.65
    """share of the peak that matrix products in bfloat16 reach"""
    share: float = 0.75
    """share of the peak that matrix products in float32 reach"""
    bandwidth_share: float = 0.8
    """share of the bandwidth that operations reach that only move data"""
    link_share: float = 0.7
    """share of the links that collective operations reach"""
    per_operation: float = 8e-6
    """seconds in which Python starts an operation"""

    def product_rate(self, precision: Precision) -> float:
        """Return the floating-point operations per second that matrix products and attention reach.

        In TF32, NVIDIA's GPUs do half of what they do in bfloat16.
        """
        if precision == "full":
            return self.flops * self.share
        if precision == "half":
            return self.half_flops * self.half_share
        return self.half_flops / 2 * self.half_share

    def link_rate(self, devices: int) -> float:
        """Return the bytes per second that each of so many devices sends in a ring."""
        return self.link_share * (self.link if devices <= self.per_host else min(self.link, self.network))


_GB, _TF = 1e9, 1e12
_NVIDIA = "https://www.nvidia.com/en-us/data-center"
DEVICES = {
    one.name: one
    for one in (
        Device("h100", 80 * _GB, 989 * _TF, 67 * _TF, 3350 * _GB, 450 * _GB, 50 * _GB, f"{_NVIDIA}/h100/"),
        Device("h200", 141 * _GB, 989 * _TF, 67 * _TF, 4800 * _GB, 450 * _GB, 50 * _GB, f"{_NVIDIA}/h200/"),
        Device("b200", 180 * _GB, 2250 * _TF, 75 * _TF, 8000 * _GB, 900 * _GB, 50 * _GB, f"{_NVIDIA}/dgx-b200/"),
        Device("a100", 80 * _GB, 312 * _TF, 19.5 * _TF, 2039 * _GB, 300 * _GB, 25 * _GB, f"{_NVIDIA}/a100/"),
        Device("l40s", 48 * _GB, 362 * _TF, 91.6 * _TF, 864 * _GB, 32 * _GB, 25 * _GB, f"{_NVIDIA}/l40s/"),
        Device("a6000", 48 * _GB, 154.8 * _TF, 38.7 * _TF, 768 * _GB, 32 * _GB, 12.5 * _GB,
               "https://www.nvidia.com/en-us/products/workstations/rtx-a6000/"),
    )
}  # fmt: skip
"""GPUs by name. Networks are those of NVIDIA's own servers: 400 Gb/s per GPU from H100 on, 200 Gb/s before."""
MEASURES = "cavesson check RECIPE.toml --short-run measures memory and the time of a step"
"""What to do on a CPU instead."""


def device_of(name: str, processes: int) -> Device:
    """Return a device by name.

    Raises:
        UserError: the device is unknown, or the devices do not fill whole hosts.
    """
    if name == "cpu":
        raise UserError(f"--gpu cpu: only GPUs are planned; on a CPU, {MEASURES}")
    if name not in DEVICES:
        raise UserError(f"--gpu {name}: unknown device; choose one of {', '.join(DEVICES)}")
    device = DEVICES[name]
    if processes > device.per_host and processes % device.per_host:
        raise UserError(
            f"--gpus {processes} does not fill hosts of {device.per_host} GPUs; give a multiple of {device.per_host}"
        )
    return replace(device, per_host=min(device.per_host, processes))
