"""Lost parameter servers are started again with what the last checkpoint has."""

import warnings

import jax.numpy as jnp
import pytest

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager
from jaxstrategy.coordinator import ClusterCoordinator, Threads

TOLD = r"Parameter server .* was lost and started again. All variables were rolled back"


class Training:
    """Three variables on two servers, a function that counts, and a manager."""

    def __init__(self, folder, **options):
        self.backend = Threads(2, 2)
        self.strategy = js.ParameterServerStrategy(backend=self.backend)
        with self.strategy.scope():
            self.state = {name: js.Variable(jnp.zeros(4)) for name in "abc"}
        self.manager = CheckpointManager(folder)
        self.coordinator = ClusterCoordinator(
            self.strategy, restore_from=self.manager, state=self.state, **options
        )
        a, b, c = self.state.values()

        @self.coordinator.function
        def step(x):
            a.assign_add(jnp.ones(4))
            b.assign_add(jnp.ones(4))
            c.update(lambda old, by: old + by, jnp.ones(4))
            return x

        self.step = step

    def schedule(self, count):
        return [self.coordinator.schedule(self.step, (float(i),)) for i in range(count)]

    def totals(self):
        return [variable.value()[0].item() for variable in self.state.values()]

    def joined(self):
        """The warnings of joining."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self.coordinator.join(timeout=60)
        return [str(each.message) for each in told]

    def close(self):
        self.strategy.close()
        self.manager.close()


@pytest.fixture
def training(tmp_path):
    made = Training(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("lost", [[1], [0, 1]])
def test_all_is_rolled_back_together(training, lost):
    training.schedule(10)
    training.coordinator.join()
    training.manager.save(10, training.state)
    training.schedule(5)
    training.coordinator.join()
    assert training.totals() == [15] * 3
    for server in lost:
        training.backend.kill_server(server)
    values = training.schedule(7)
    (told,) = training.joined()
    names = " and ".join(map(str, lost))
    assert told.startswith(f"Parameter server {names} was lost and started again.")
    assert "rolled back to checkpoint 10: what 5 functions did" in told
    # Those before the checkpoint, and each that was queued or ran once.
    assert training.totals() == [17] * 3
    assert training.coordinator.fetch(values) == list(range(7))
    assert training.joined() == []


def test_functions_that_run_count_once(training):
    """Some have pushed to the living server already, which was rolled back."""
    values = training.schedule(200)
    values[20].fetch()
    training.backend.kill_server(0)
    told = " ".join(training.joined())
    lost = int(told.split("what ")[1].split()[0])
    assert training.totals() == [200 - lost] * 3
    assert training.coordinator.fetch(values) == list(range(200))


def test_a_server_lost_while_idle_is_noticed(training):
    training.schedule(1)
    training.coordinator.join()
    training.manager.save(1, training.state)
    training.manager.wait()
    training.backend.kill_server(0)
    thread = training.coordinator._scheduler._recovery
    from helpers.threads import until

    until(lambda: thread._told)
    assert training.totals() == [1] * 3
    with pytest.warns(RuntimeWarning, match=TOLD):
        assert training.coordinator.done()


def test_a_server_lost_again_while_all_is_restored(training, monkeypatch):
    restore, times = training.manager.restore, []

    def lost_again(state):
        times.append(len(times))
        if len(times) == 1:
            training.backend.kill_server(1)
        return restore(state)

    monkeypatch.setattr(training.manager, "restore", lost_again)
    training.schedule(4)
    training.coordinator.join()
    training.backend.kill_server(0)
    training.schedule(6)
    (told,) = training.joined()
    assert told.startswith("Parameter server 0 and 1 was lost") and len(times) == 2
    assert training.totals() == [6] * 3


def test_a_server_lost_while_a_checkpoint_is_read_is_no_checkpoint(training):
    training.schedule(4)
    training.coordinator.join()
    with training.coordinator.paused():
        training.backend.kill_server(1)
        with pytest.raises(js.errors.ParameterServerLost, match="server 1 was killed"):
            training.manager.save(4, training.state)
    training.schedule(1)
    (told,) = training.joined()
    assert "rolled back to checkpoint 0: what 4 functions did" in told
    assert training.totals() == [1] * 3
    assert training.manager.all_steps() == [0]
    assert training.manager.save(5, training.state)


def test_a_server_that_is_lost_too_often_is_given_up(tmp_path):
    training = Training(tmp_path, max_restarts=0)
    try:
        training.backend.kill_server(1)
        training.coordinator.schedule(training.step, (0.0,))
        for call in (training.coordinator.join, training.coordinator.done):
            for _ in range(2):
                with pytest.raises(
                    js.errors.ParameterServerLost, match="not started again"
                ):
                    call()
    finally:
        training.close()


def test_checkpoints_that_cannot_be_restored_are_the_error(training, tmp_path):
    training.schedule(1)
    training.coordinator.join()
    training.manager.delete(0)
    training.backend.kill_server(0)
    training.coordinator.schedule(training.step, (0.0,))
    with pytest.raises(
        js.errors.ParameterServerLost, match="There is no checkpoint in"
    ) as got:
        training.coordinator.join()
    assert isinstance(got.value.__cause__, FileNotFoundError)


def test_variables_that_are_not_in_the_state_are_refused(training):
    with training.strategy.scope():
        other = js.Variable(0.0)

    @training.coordinator.function
    def uses():
        return other + 1

    with pytest.raises(ValueError, match="1 of the variables that the function uses"):
        training.coordinator.schedule(uses)


def test_what_cannot_be_restored_is_refused_at_once(tmp_path, monkeypatch):
    strategy = js.ParameterServerStrategy(workers=1, backend="threads")
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(ValueError, match="`state` has no variable on a param"):
            ClusterCoordinator(strategy, restore_from=manager, state={"a": 1})
        ClusterCoordinator(strategy)
        with pytest.raises(ValueError, match="coordinator without it, or with another"):
            ClusterCoordinator(strategy, restore_from=manager, state={"a": 1})
        strategy.close()
        monkeypatch.setattr(Threads, "can_restart_servers", False)
        with pytest.raises(ValueError, match="a Threads cannot start a parameter serv"):
            ClusterCoordinator(strategy, restore_from=manager, state={"a": 1})
    strategy.close()
