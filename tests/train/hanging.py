"""A process of several: hanging.py HOW RANK; the process with that rank hangs where the others wait for it."""

import os
import signal
import sys
import time

from cavesson.processes import Processes

how, hangs = sys.argv[1], os.environ["RANK"] == sys.argv[2] or sys.argv[2] == "all"
processes = Processes("cpu", timeout=2)
processes.resume_hint = "cavesson go"
for number in range(2):  # one run after the other
    with processes.watched():
        processes.enter(f"run {number}")
        processes.of_all(number)
with processes.watched():
    processes.enter("work")
    processes.wait()
    processes.enter("nap")
    time.sleep(0.2)
    if how == "steps":  # longer than the timeout, in steps that are shorter
        for _ in range(6):
            time.sleep(0.6)
            processes.beat()
    elif hangs and how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif hangs and how == "asleep":
        time.sleep(600)
    processes.wait()
