"""A simulated world that tries to break publishers, subscribers and collectors.

One seed, one world: what is published, who is scheduled when, what the store, the disks and the
clocks do wrong, who is killed where. The same seed gives the same world, event by event. While it
runs, every promise Weightwire makes is checked against a record of what really was committed.
"""

from weightwire.testing.world.promises import Violation
from weightwire.testing.world.troubles import Trouble
from weightwire.testing.world.world import WorldReport, run_world

__all__ = ["Trouble", "Violation", "WorldReport", "run_world"]
