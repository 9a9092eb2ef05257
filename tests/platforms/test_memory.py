"""How much memory there is, as the system and a container's limit say."""

import mmap
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from cavesson import memory
from cavesson.models import device_memory

CPU = torch.device("cpu")


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a container that has used 300 MB, 120 MB of them for files that the kernel can drop."""
    (tmp_path / "memory.current").write_text(f"{300 << 20}\n")
    (tmp_path / "memory.stat").write_text(
        f"anon {180 << 20}\ninactive_file {70 << 20}\nactive_file {50 << 20}\nworkingset_refault_file {9 << 20}\n"
    )
    monkeypatch.setattr(device_memory, "_CGROUP", tmp_path)
    return tmp_path


def test_a_container_has_what_its_limit_allows(container: Path) -> None:
    (container / "memory.max").write_text(f"{400 << 20}\n")
    assert device_memory.total_memory(CPU) == 400 << 20
    # 400 - (300 - 70 - 50) MB
    assert device_memory.free_memory(CPU) == min(220 << 20, psutil.virtual_memory().available)


@pytest.mark.parametrize("limit", ["max\n", f"{1 << 60}\n", None], ids=["none", "huge", "no-file"])
def test_without_a_limit_it_is_what_the_machine_has(container: Path, limit: str | None) -> None:
    if limit is not None:
        (container / "memory.max").write_text(limit)
    assert device_memory.total_memory(CPU) == psutil.virtual_memory().total
    free = psutil.virtual_memory().available
    assert device_memory.free_memory(CPU) == pytest.approx(free, rel=0.2)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs a system that says it")
def test_what_is_touched_is_resident() -> None:
    before = memory.resident()
    # Not from the heap, which may have resident memory left of what was freed before.
    with mmap.mmap(-1, 300 << 20), mmap.mmap(-1, 200 << 20) as touched:  # the first are addresses only
        touched.write(b"x" * len(touched))
        assert memory.resident() - before >= len(touched) * 0.9


def test_the_reader_of_a_record_needs_neither_torch_nor_psutil_for_it() -> None:
    code = "import sys; from cavesson import memory; memory.resident(); print({'torch', 'psutil'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
