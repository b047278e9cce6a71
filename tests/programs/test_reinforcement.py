"""rlax and mctx: returns of a trajectory, and a tree search, differentiated in what they learn."""

import jax
import jax.numpy as jnp
import pytest

from .against_forward_mode import assert_agrees, import_or_skip

pytestmark = [pytest.mark.programs, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

STEPS, ACTIONS = 40, 4
OBSERVED = jnp.sin(jnp.arange(3.0 * (STEPS + 1)) ** 2).reshape(STEPS + 1, 3)
REWARDS = jnp.cos(jnp.arange(1.0 * STEPS) ** 2)
DISCOUNTS = jnp.where(jnp.arange(STEPS) % 11 == 10, 0.0, 0.9)
TAKEN = jnp.arange(STEPS) ** 2 % ACTIONS
GOES_ON = {"stop_target_gradients": False}


def judged(weights):
    """Return the values of states and of actions, and how much more likely the actions are now."""
    hidden = jnp.tanh(OBSERVED @ weights["in"])
    q = hidden @ weights["q"]
    policy = jax.nn.softmax(q)
    return hidden @ weights["v"], q, policy, policy[jnp.arange(STEPS), TAKEN] * ACTIONS


def lambda_returns(rlax, weights):
    v, q, _, _ = judged(weights)
    return rlax.lambda_returns(REWARDS, DISCOUNTS, v[1:], jax.nn.sigmoid(q[1:, 0]))


def vtrace(rlax, weights):
    v, _, _, more = judged(weights)
    found = rlax.vtrace_td_error_and_advantage(
        v[:-1], v[1:], REWARDS, DISCOUNTS, more, 0.9, **GOES_ON
    )
    return found.errors + found.pg_advantage * more


def retrace(rlax, weights):
    _, q, policy, _ = judged(weights)
    drawn = jnp.full(STEPS, -jnp.log(ACTIONS))
    after = jnp.roll(TAKEN, -1)
    return rlax.retrace(
        q[:-1], q[1:], TAKEN, after, REWARDS, DISCOUNTS, policy[1:], drawn, 0.9, **GOES_ON
    )


HOWS = [{}, {"checkpoints": "all"}, {"memory": "16 kB"}]


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("returns", [lambda_returns, vtrace, retrace])
def test_returns(returns, how):
    rlax = import_or_skip("rlax")
    weights = {
        "in": 0.3 * jnp.sin(jnp.arange(24.0)).reshape(3, 8),
        "q": jnp.cos(jnp.arange(8.0 * ACTIONS)).reshape(8, ACTIONS),
        "v": jnp.sin(jnp.arange(8.0) ** 2),
    }
    assert_agrees(lambda weights: jnp.mean(returns(rlax, weights) ** 2), weights, **how)


SIMULATIONS = 6


@pytest.mark.parametrize("how", [{}, {"checkpoints": "all", "max_steps": SIMULATIONS + 1}], ids=str)
def test_a_tree_search(how):
    """Walks down the tree and back up are while loops, of as many steps as a lane of two needs."""
    mctx = import_or_skip("mctx")
    seen = jnp.sin(jnp.arange(10.0)).reshape(2, 5)

    def expanded(weights, key, action, state):
        state = jnp.tanh(jnp.einsum("bij,bj->bi", weights["moves"][action], state))
        judged = mctx.RecurrentFnOutput(
            reward=state @ weights["reward"],
            discount=jnp.full(2, 0.9),
            prior_logits=state @ weights["prior"],
            value=state @ weights["value"],
        )
        return judged, state

    def loss(weights):
        root = mctx.RootFnOutput(
            prior_logits=seen @ weights["prior"], value=seen @ weights["value"], embedding=seen
        )
        found = mctx.gumbel_muzero_policy(
            weights, jax.random.key(1), root, expanded, SIMULATIONS, max_depth=4
        )
        summary = found.search_tree.summary()
        return jnp.mean(summary.value**2) + jnp.mean(summary.qvalues**2)

    weights = {
        "moves": jnp.cos(jnp.arange(75.0)).reshape(3, 5, 5),
        "reward": jnp.sin(jnp.arange(5.0)),
        "value": jnp.cos(jnp.arange(5.0)),
        "prior": jnp.sin(jnp.arange(15.0) ** 2).reshape(5, 3),
    }
    assert_agrees(loss, weights, order=1, **how)
