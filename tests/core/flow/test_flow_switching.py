"""Switching decides again only what may have changed; the answer must be as if it had decided everything."""

from __future__ import annotations

from copy import deepcopy
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.flow.fleet import Fleet
from headrace.flow.interrupted import InterruptedFleet
from headrace.flow.switching import Switching
from headrace.flow.versions import Versions


class World:
    """Random things happen to a fleet and its versions."""

    def __init__(self, seed: int, *, interrupts: bool) -> None:
        self.random = Random(seed)
        self.fleet = (InterruptedFleet if interrupts else Fleet)(lookahead=1.25)
        self.versions = Versions(0, interrupts=interrupts)
        self.switching = Switching(self.fleet, self.versions)
        self.open: dict[int, int] = {}
        """Trajectory → version; every trajectory is a group of its own."""
        self.next = 0

    def step(self) -> None:
        random, fleet = self.random, self.fleet
        names = [instance.name for instance in fleet.instances]
        match random.randrange(13):
            case 0 if len(names) < 4:
                fleet.join(f"i{self.next}", slots=2, live_versions=random.randint(1, 3), versions=())
                self.next += 1
            case 1 if names and random.random() < 0.4:
                random.choice([fleet.leave, fleet.drain])(random.choice(names))
            case 2 | 3:
                self.open[self.next] = self.versions.newest
                self.versions.opened(self.versions.newest)
                self.place(self.next)
                self.next += 1
            case 4 if self.open:
                self.place(random.choice(list(self.open)))
            case 5 if self.open:
                fleet.remove(random.choice(list(self.open)))
            case 6 if self.open:
                trajectory = random.choice(list(self.open))
                fleet.remove(trajectory)
                self.versions.closed(self.open.pop(trajectory))
            case 7 if random.random() < 0.3:
                self.versions.publish(self.versions.newest + 1)
            case 8:
                for version in self.versions.retirable():
                    self.versions.retire(version)
            case 9:
                self.versions.pin(random.choice(self.versions.live))
            case 10 if self.versions.pinned:
                self.versions.unpin(random.choice(sorted(self.versions.pinned)))
            case 11 if names and random.random() < 0.2:
                instance = random.choice(fleet.instances)
                for version in list(instance.hosted):
                    fleet.retire(instance.name, version)
            case 12 if names:
                instance = random.choice(fleet.instances)
                fleet.switch(instance.name, not instance.switching)

    def place(self, trajectory: int) -> None:
        version = self.versions.newest if self.fleet.interrupts else self.open[trajectory]
        self.fleet.remove(trajectory)
        self.switching.settle()
        self.fleet.place(trajectory, version, self.fleet.room(version))

    def carry_one_out(self) -> None:
        switches = self.switching.switches()
        if switches and self.random.random() < 0.5:
            switch = self.random.choice(switches)
            assert not any(i.switching for i in self.fleet.instances if i.name == switch.instance)
            for version in switch.retire:
                self.fleet.retire(switch.instance, version)
            if switch.load is not None:
                self.fleet.commit(switch.instance, switch.load)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), interrupts=st.booleans())
def test_deciding_again_only_what_changed_is_deciding_everything(seed: int, interrupts: bool) -> None:
    world = World(seed, interrupts=interrupts)
    for _ in range(150):
        world.step()
        world.carry_one_out()
        decided = world.switching.switches()
        again = deepcopy(world)
        again.fleet.touched.update(again.fleet.instances)
        assert again.switching.switches() == decided
