"""The faults, by the part of a trainer in which they occur."""

from benchmarks.faults.fault import Fault
from benchmarks.faults.planted import credit, data, engine, models, rewards, sampling, update

MODULES = (sampling, engine, credit, models, update, rewards, data)
FAULTS: dict[str, Fault] = {
    one.name: one for module in MODULES for one in vars(module).values() if isinstance(one, Fault)
}
