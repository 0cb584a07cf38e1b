"""What an evaluation holds back, and lets go."""

from __future__ import annotations

from headrace.config import EvaluationConfig
from headrace.run.evaluation import EvaluationPlan, Evaluator
from headrace.services.messages import EvaluationDone
from support.desk import Desk, played, published, turns


async def test_an_instance_of_one_version_goes_on_to_the_next_when_its_evaluation_ends() -> None:
    """Though nothing else happens then: no group may start before it has the new version."""
    desk = await Desk(instances=1, live_versions=1).begin()
    evaluator = Evaluator(
        EvaluationPlan(
            config=EvaluationConfig(sampled=False),
            tasks=1,
            seed=0,
            max_new_tokens=4,
            temperature=1.0,
            lockstep=False,
        ),
        controller=desk.controller,
        fleet=desk.fleet,
        emit=desk.emit,
        record=lambda _: None,
    )
    group = await desk.work("w.0")
    assert group is not None
    await desk.say("w.0", *played(group))
    desk.flow.pin(0)
    ended = evaluator.begin(0, finished=lambda: desk.flow.unpin(0))
    item = await desk.work("w.0")
    assert item is not None
    assert item.kind == "evaluation"
    desk.controller.trained((await desk.controller.take_batch()).lease, applied=True)
    desk.fleet.published(published(1))
    desk.flow.published(1)
    desk.controller.pump()
    await turns()
    instance = desk.peers["rollout-0.0"]
    assert not instance.waits("load_version")
    await desk.say("w.0", EvaluationDone(item=item.group, greedy=True, versions=[0], failed={}, samples=[]))
    await turns()
    assert ended.done()
    assert instance.waits("load_version")
