"""Iterations: how often each loop of a program goes round, found by running it on a CPU.

A compiler that does not know a loop's trip count cannot say what the loop costs. So the program, as
JAX hands it to the compiler, is numbered: loops and branches get an attribute that the compiler
leaves on what becomes of them. The same program with a counter for each number, carried through all
loops and calls, is then run on a CPU. What it returns are the exact counts of the program that was
compiled, for these arguments, whoever made its loops.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func, stablehlo

ATTRIBUTE = "counted"
"""The number of a loop, or of the first of some branches, in the compiled program's text too."""
_FRONTEND = "mhlo.frontend_attributes"
_LOOP, _CALL, _CUSTOM = "stablehlo.while", "func.call", "stablehlo.custom_call"
_BRANCHES = "stablehlo.case", "stablehlo.if"


def number(module: Any) -> int:
    """Numbers the loops and branches of a lowered program, in place; returns how many there are."""
    count = 0
    with module.context:
        for op in _chosen(module.body):
            known = op.attributes.get(_FRONTEND, ())
            entries = {entry.name: entry.attr for entry in known}
            entries[ATTRIBUTE] = ir.StringAttr.get(str(count))
            op.attributes[_FRONTEND] = ir.DictAttr.get(entries)
            count += 1 if op.name == _LOOP else len(op.regions)
    return count


def counts(module: Any, count: int, arguments: Sequence[Any]) -> np.ndarray:
    """Count how often each body of a numbered loop, and each branch, runs with these arguments."""
    shell = jax.jit(lambda *_: jnp.zeros(count, jnp.int32), keep_unused=True).lower(*arguments)
    inside = shell.compiler_ir("stablehlo")  # whose program is exchanged for one that counts
    with inside.context, ir.Location.unknown():
        program = ir.Module.parse(str(module))
        _fill(program)
        _Counting(program, count).main()
        for op in [*inside.body.operations]:
            op.erase()
        for op in [*program.body.operations]:
            inside.body.append(op)
    return np.asarray(shell.compile()(*arguments))


def multiplications(module: Any, counts: Sequence[int]) -> float:
    """Count the multiplications in products of matrices, by how often each numbered body runs."""
    products: list[tuple[str, float | None, int]] = []  # None: as often as the function is called
    calls: list[tuple[str, float | None, str]] = []

    def visit(block: Any, function: str, times: float | None) -> None:
        for op in (each.operation for each in block.operations):
            if op.name == "stablehlo.dot_general":
                products.append((function, times, _multiplied(op)))
            elif op.name == _CALL:
                callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
                calls.append((function, times, callee))
            elif op.name == _LOOP:
                visit(op.regions[1].blocks[0], function, int(counts[_number(op)]))
            elif op.name in _BRANCHES:
                for k, region in enumerate(op.regions):
                    visit(region.blocks[0], function, int(counts[_number(op) + k]))

    def runs(function: str) -> float:
        if function == "main":
            return 1
        of = [(caller, times) for caller, times, callee in calls if callee == function]
        return sum(runs(caller) if times is None else times for caller, times in of)

    for op in (each.operation for each in module.body.operations):
        if op.name == "func.func":
            visit(op.regions[0].blocks[0], ir.StringAttr(op.attributes["sym_name"]).value, None)
    return sum(n * (runs(f) if times is None else times) for f, times, n in products)


def _multiplied(product: Any) -> int:
    """Return the multiplications in a product of two arrays."""
    shapes = [ir.RankedTensorType(v.type).shape for v in (*product.operands, product.results[0])]
    numbers = re.search(r"contracting_dims = \[([\d, ]*)\]", str(product))
    axes = [int(n) for n in numbers[1].split(",")] if numbers and numbers[1].strip() else []
    return math.prod(shapes[2]) * math.prod(shapes[0][a] for a in axes)


def _all(block: Any) -> Iterator[Any]:
    for op in [*block.operations]:
        yield op.operation
        for region in op.operation.regions:
            for inner in region.blocks:
                yield from _all(inner)


def _chosen(block: Any) -> Iterator[Any]:
    return (op for op in _all(block) if op.name in (_LOOP, *_BRANCHES))


def _fill(module: Any) -> None:
    """Zeros where a TPU takes memory as it finds it, which a CPU cannot."""
    for op in [*_all(module.body)]:
        target = op.attributes.get("call_target_name") if op.name == _CUSTOM else None
        if target is not None and ir.StringAttr(target).value == "AllocateBuffer":
            (result,) = op.results
            zero = ir.DenseElementsAttr.get(np.zeros((), np.int8))
            with ir.InsertionPoint(op):
                byte = stablehlo.constant(zero)
                kind = ir.RankedTensorType(result.type).element_type
                number = stablehlo.convert(ir.RankedTensorType.get([], kind), byte)
                filled = stablehlo.broadcast_in_dim(
                    result.type, number, ir.DenseI64ArrayAttr.get([])
                )
            result.replace_all_uses_with(filled)
            op.erase()


class _Counting:
    """Makes a program carry counters through whatever holds one of its numbered operations."""

    def __init__(self, module: Any, count: int):
        functions = (op for op in module.body.operations if isinstance(op, func.FuncOp))
        self.functions = {f.name.value: f for f in functions}
        self.count = count
        self.type = ir.RankedTensorType.get([count], ir.IntegerType.get_signless(32))
        self.done: set[str] = set()

    def main(self) -> None:
        """The main function counts, and returns nothing but the counters."""
        main = self.functions["main"]
        block = main.regions[0].blocks[0]
        with ir.InsertionPoint.at_block_begin(block):
            start = self.constant(np.zeros(self.count, np.int32))
        end = self.thread(block, start)
        self.finish(block, "func.return", [end])
        inputs = [argument.type for argument in block.arguments]
        self.retype(main, inputs, [self.type])

    def thread(self, block: Any, counter: Any) -> Any:
        """Carries the counter through the operations of a block; returns it as it is at the end."""
        for op in [*block.operations]:
            op = op.operation
            if op.name == _LOOP:
                counter = self.loop(op, counter)
            elif op.name in _BRANCHES:
                counter = self.branches(op, counter)
            elif op.name == _CALL and self.counts(self.callee(op)):
                counter = self.call(op, counter)
            elif any(self.counts(region) for region in op.regions):
                raise NotImplementedError(f"loops inside {op.name} are not counted")
        return counter

    def loop(self, op: Any, counter: Any) -> Any:
        cond, body = (region.blocks[0] for region in op.regions)
        if self.counts(op.regions[0]):
            raise NotImplementedError("loops inside a predicate are not counted")
        number = _number(op)
        cond.add_argument(self.type, op.location)
        inside = body.add_argument(self.type, op.location)
        end = self.thread(body, self.add_one(body, inside, number))
        self.finish(body, "stablehlo.return", [*_operands(_last(body)), end])
        return self.replace(op, [*op.operands, counter])

    def branches(self, op: Any, counter: Any) -> Any:
        for offset, region in enumerate(op.regions):
            block = region.blocks[0]
            end = self.thread(block, self.add_one(block, counter, _number(op) + offset))
            self.finish(block, "stablehlo.return", [*_operands(_last(block)), end])
        return self.replace(op, op.operands)

    def call(self, op: Any, counter: Any) -> Any:
        name = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
        function = self.functions[name]
        if name not in self.done:
            self.done.add(name)
            block = function.regions[0].blocks[0]
            end = self.thread(block, block.add_argument(self.type, op.location))
            results = [*_operands(_last(block)), end]
            self.finish(block, "func.return", results)
            inputs = [argument.type for argument in block.arguments]
            self.retype(function, inputs, [value.type for value in results])
        return self.replace(op, [*op.operands, counter])

    def counts(self, region: Any) -> bool:
        """Return whether anything in a region, or in what it calls, has a number."""
        ops = [op.operation for block in region.blocks for op in block.operations]
        return any(
            op.name in (_LOOP, *_BRANCHES)
            or (op.name == _CALL and self.counts(self.callee(op)))
            or any(map(self.counts, op.regions))
            for op in ops
        )

    def callee(self, op: Any) -> Any:
        return self.functions[ir.FlatSymbolRefAttr(op.attributes["callee"]).value].regions[0]

    def add_one(self, block: Any, counter: Any, number: int) -> Any:
        with ir.InsertionPoint.at_block_begin(block):
            one = self.constant(np.arange(self.count, dtype=np.int32) == number)
            return stablehlo.add(counter, one)

    def constant(self, values: np.ndarray) -> Any:
        return stablehlo.constant(ir.DenseElementsAttr.get(values.astype(np.int32)))

    def replace(self, op: Any, operands: Sequence[Any]) -> Any:
        """Replace an operation by one with other operands and one more result, and return that
        result."""
        types = [*(result.type for result in op.results), self.type]
        attributes = {name: op.attributes[name] for name in op.attributes}
        with ir.InsertionPoint(op):
            new = ir.Operation.create(
                op.name, types, [*operands], attributes, regions=len(op.regions), loc=op.location
            )
        for old_region, region in zip(op.regions, new.regions, strict=True):
            for block in [*old_region.blocks]:
                block.append_to(region)
        *kept, counter = new.results
        for old, result in zip(op.results, kept, strict=True):
            old.replace_all_uses_with(result)
        op.erase()
        return counter

    def finish(self, block: Any, name: str, values: Sequence[Any]) -> None:
        last = _last(block)
        with ir.InsertionPoint(last):
            ir.Operation.create(name, [], [*values])
        last.erase()

    def retype(self, function: Any, inputs: Sequence[Any], results: Sequence[Any]) -> None:
        kind = ir.FunctionType.get([*inputs], [*results])
        function.attributes["function_type"] = ir.TypeAttr.get(kind)
        for name in ("arg_attrs", "res_attrs"):
            if name in function.attributes:
                del function.attributes[name]


def _number(op: Any) -> int:
    return int(ir.StringAttr(ir.DictAttr(op.attributes[_FRONTEND])[ATTRIBUTE]).value)


def _last(block: Any) -> Any:
    return [*block.operations][-1].operation


def _operands(op: Any) -> list[Any]:
    return [*op.operands]
