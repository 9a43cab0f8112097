"""A 0-d tensor's shape is empty, and an empty shape is still a shape."""

from __future__ import annotations

import numpy as np

import weightwire as ww


def test_a_number_reshaped_to_one_element_and_back_keeps_its_bits() -> None:
    flat, scalar = np.array([3.5]), np.array(3.5)
    for before, after in ((scalar, flat), (flat, scalar)):
        state = {"x": before.copy()}
        patch = ww.diff(state, {"x": after})
        ww.apply(state, patch)
        assert patch.n_changed == 0
        assert state["x"].shape == after.shape
        assert state["x"].tobytes() == after.tobytes()
