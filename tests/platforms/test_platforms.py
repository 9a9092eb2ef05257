"""Code that Windows does not have is used nowhere without a question."""

import subprocess
import sys

CODE = """
import importlib, os, pkgutil, sys

MISSING = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}


def asks(frame):
    '''Whether the line stands in a block that Windows skips.'''
    *before, line = open(frame.f_code.co_filename, encoding="utf-8").read().splitlines()[: frame.f_lineno]
    width = len(line) - len(line.lstrip())
    outer = next((one for one in reversed(before) if one.strip() and len(one) - len(one.lstrip()) < width), '')
    return outer.strip() == 'if sys.platform != "win32":'


class Windows:
    '''What Windows lacks cannot be imported by this package; the standard library of this system goes on using it.'''

    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if name in MISSING and frame.f_globals["__name__"].startswith("cavesson") and not asks(frame):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


import asyncio, multiprocessing.popen_spawn_posix, subprocess, tempfile  # before anything is missing

for name in MISSING:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Windows())
for name in ("nice", "fork", "sysconf", "geteuid", "getuid", "pread", "O_DIRECTORY", "O_NOFOLLOW"):
    delattr(os, name)

import cavesson

light = ("record", "index", "importers", "exporters", "doctor", "board", "text", "cli", "config", "errors", "command")
names = [name for _, name, _ in pkgutil.iter_modules(cavesson.__path__, "cavesson.")]
names = [name for name in names if name.removeprefix("cavesson.").startswith(light)]
count = 0
while names:
    module = importlib.import_module(names.pop())
    names += [name for _, name, _ in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{module.__name__}.")]
    assert "torch" not in sys.modules, f"{module.__name__} imports torch"
    count += 1
print(count)
"""


def test_every_module_that_reads_records_is_imported_without_what_windows_lacks() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 140
