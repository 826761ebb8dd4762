"""Updates of `compat.v1`: numbers of TensorFlow 2.21."""

import pytest
from helpers.first_generation import mirrored, replica_id

import jaxstrategy as js


def variable(s, value, **options):
    with s.scope():
        return js.Variable(value, **options)


# update_non_slot.


def test_updates_that_are_refused():
    s = mirrored()
    v, x = variable(s, 1.0), s.run(lambda: replica_id() + 1.0)
    place = s.extended.non_slot_devices([v])
    update = s.extended.update_non_slot
    with pytest.raises(ValueError, match="`extended.update_non_slot` was given a PerR"):
        update(place, lambda x: 10 * x, args=(x,))
    with pytest.raises(ValueError, match="`extended.update` was given a PerReplica"):
        s.extended.update(v, lambda v, x: v.assign(x), args=(x,))
    with pytest.raises(RuntimeError, match="`strategy.extended.update_non_slot` was c"):
        s.run(lambda: update(place, lambda: 0))
    with pytest.raises(RuntimeError, match="`strategy.extended.update` was called ins"):
        s.run(lambda: s.extended.update(v, lambda v: 0))
    with pytest.raises(TypeError, match="`extended.update_non_slot` was given 3, whic"):
        update(place, 3)
    with pytest.raises(TypeError, match="`args` was a float; a tuple"):
        update(place, lambda x: x, 3.0)
    with pytest.raises(TypeError, match="`destinations` was 3; a device"):
        update(3, lambda: 0)
    with pytest.raises(TypeError, match="`extended.update` was given 3, a int"):
        s.extended.update(3, lambda v: 0)


# Places.


def test_variables_beside_the_non_slot_devices():
    s = mirrored()
    place = s.extended.non_slot_devices([])
    for block in (s.extended.colocate_vars_with, s.colocate_vars_with):
        with s.scope(), block(place):
            v = js.Variable(1.0)
        assert v.devices == place and s.extended.variable_created_in_scope(v)
        with s.scope(), block(v):
            w = js.Variable(1.0)
        assert w.devices == v.devices
    with pytest.raises(RuntimeError, match="was called outside of the scope of"):
        with s.extended.colocate_vars_with(place):
            pass
    other = mirrored(4)
    with other.scope(), pytest.raises(ValueError, match="of .*not one made in the sc"):
        with other.extended.colocate_vars_with(v):
            pass
