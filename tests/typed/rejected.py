"""Calls that type checkers must refuse: an unneeded ignore is an error. Nothing here runs."""

import jax.numpy as jnp
from jax import Array
from loops import Newton, State, add, halve, newton

import loopkit
from loopkit import Buffer, TensorArray

ones = jnp.ones(3)


def mixed(state: State) -> Newton:
    return Newton(state.x, state.x)


def of_newton(carry: Newton) -> Array:
    return carry.x > 1


def functions() -> None:
    loopkit.while_loop(of_newton, mixed, State(ones))  # type: ignore
    loopkit.while_loop(of_newton, halve, ones)  # type: ignore
    loopkit.while_loop(of_newton, newton, State(ones))  # type: ignore
    loopkit.while_loop(of_newton, newton)  # type: ignore
    loopkit.while_loop(lambda _: "yes", newton, ones)  # type: ignore
    loopkit.fori_loop(0.5, 3, lambda _, x: x, ones)  # type: ignore
    loopkit.scan(halve, ones, ones)  # type: ignore
    loopkit.scan(add, State(ones), ones)  # type: ignore
    loopkit.ragged_scan(add, 0.0, ones)  # type: ignore


def settings() -> None:
    loopkit.while_loop(lambda x: x > 1, halve, 10.0, max_step=3)  # type: ignore
    loopkit.while_loop(lambda x: x > 1, halve, 10.0, checkpoints="al")  # type: ignore
    loopkit.while_loop(lambda x: x > 1, halve, 10.0, memory=1e6)  # type: ignore
    loopkit.while_loop(lambda x: x > 1, halve, 10.0, until=None)  # type: ignore
    loopkit.scan(add, 0.0, ones, unroll="always")  # type: ignore
    loopkit.scan(add, 0.0, ones, throw=True)  # type: ignore
    loopkit.scan(add, 0.0, ones, debug="infinite")  # type: ignore
    loopkit.scan(add, 0.0, ones, progress=print)  # type: ignore
    loopkit.scan(add, 0.0, ones, lanes="queue")  # type: ignore
    loopkit.unbounded_scan(add, 0.0, ones)  # type: ignore
    loopkit.checkpointed(halve, only="scan")  # type: ignore
    loopkit.blocked(halve, blocks=3)  # type: ignore


def results() -> None:
    loopkit.while_loop(lambda x: x > 1, halve, 10.0).steps.sum()  # type: ignore
    _, _, _ = loopkit.scan(add, 0.0, ones)  # type: ignore
    loopkit.scan(add, 0.0, ones, return_info=False)[2]  # type: ignore
    loopkit.checkpointed(halve)(ones, 2)  # type: ignore
    loopkit.blocked(block=2)(halve)("ones")  # type: ignore


def buffers(ys: Buffer, arrays: TensorArray[Array]) -> None:
    ys + 1  # type: ignore
    ys[0] = 1.0  # type: ignore
    ys["first"]  # type: ignore
    ys.sum()  # type: ignore
    ys.at[0].set(1.0, where=True)  # type: ignore
    arrays.read(slice(2))  # type: ignore
    arrays.append("one")  # type: ignore
    TensorArray.empty(3.0, ones)  # type: ignore
