"""How the text of a test is changed before it runs, outside of the program or with it.

A chain is a name of the program with the attributes and calls after it: `Solution().total([1, 2])`.

outside   a chain becomes a question to the prisoner:  evaluate("Solution", [["c", [], {}], ..])
          and after each statement the arguments that calls have changed are brought up to date
inside    a chain is counted:                          note(Solution().total([1, 2]))
          and comparisons, operators and calls of others go through inside.py, which sees who decides them

The names of these functions end with a space, so no text can have them.
"""

from __future__ import annotations

import _ast
import builtins
from typing import Any

OPERATIONS = {
    "Eq": "eq", "NotEq": "ne", "Lt": "lt", "LtE": "le", "Gt": "gt", "GtE": "ge",
    "In": "in", "NotIn": "not in", "Is": "is", "IsNot": "is not",
    "Add": "add", "Sub": "sub", "Mult": "mul", "Div": "truediv", "FloorDiv": "floordiv", "Mod": "mod",
    "Pow": "pow", "MatMult": "matmul", "BitAnd": "and_", "BitOr": "or_", "BitXor": "xor", "LShift": "lshift",
    "RShift": "rshift",
}  # fmt: skip
# The builtins that depend on who calls them, which is why they are called as they are.
CALLED_AS_THEY_ARE = frozenset(name for name in dir(builtins) if name not in ("pow", "divmod"))
BUILTINS = frozenset(dir(builtins))
PLACE = ("lineno", "col_offset", "end_lineno", "end_col_offset")


def chain_of(node: Any, kinds: dict[str, str]) -> tuple[str, list[Any]] | None:
    """Return the name and the nodes of the calls and attributes of a chain, or None if the node is none.

    Args:
        node: The outermost node.
        kinds: The names of the program.
    """
    steps: list[Any] = []
    while node.__class__ in (_ast.Call, _ast.Attribute):
        steps.append(node)
        inner = "func" if node.__class__ is _ast.Call else "value"
        node = getattr(node, inner)
    if node.__class__ is not _ast.Name or node.id not in kinds:
        return None
    return node.id, steps[::-1]


class Rewriting:
    """The change of one test's tree.

    Args:
        kinds: What each name of the program stands for: "function", "class" or "value".
        nodes: The nodes of the test's tree.
        inside: Whether the test runs in the program's process.
    """

    def __init__(self, kinds: dict[str, str], nodes: list[Any], inside: bool) -> None:
        stored = {
            node.id for node in nodes if node.__class__ is _ast.Name and node.ctx.__class__ is not _ast.Load
        }
        stored |= {node.arg for node in nodes if node.__class__ is _ast.arg}
        stored |= {node.name for node in nodes if node.__class__ in (_ast.FunctionDef, _ast.ClassDef)}
        stored |= {node.asname or node.name for node in nodes if node.__class__ is _ast.alias}
        # A name that the test gives a value of its own is looked up as Python does it.
        self.kinds = {name: kind for name, kind in kinds.items() if name not in stored}
        self.builtins = BUILTINS - stored - kinds.keys() if inside else BUILTINS
        self.inside = inside
        self.depth = 0  # the number of functions and context managers around the present node

    def rewrite(self, node: Any) -> Any:
        """Return what takes the place of a node."""
        kind = node.__class__
        if kind is _ast.Constant:
            return node
        if kind in (_ast.Call, _ast.Attribute):
            chain = chain_of(node, self.kinds)
            if chain is not None and (kind is _ast.Call or node.ctx.__class__ is _ast.Load):
                return self.noted_chain(node, *chain) if self.inside else self.question(node, *chain)
        if kind is _ast.Name and node.ctx.__class__ is _ast.Load:
            if self.kinds.get(node.id) == "value":
                return call_of("note ", [node], node) if self.inside else self.question(node, node.id, [])
            if self.inside and node.id in self.builtins:
                return place(_ast.Name(node.id + " ", _ast.Load()), node)
        if kind is _ast.BoolOp and not self.inside:
            first, *others = [self.rewrite(value) for value in node.values]
            node.values = [first, *[self.after_changes(value) for value in others]]
            return node
        rewritten = self.strict(node) if self.inside or kind is _ast.Compare else None
        return self.rewrite_children(node) if rewritten is None else rewritten

    def rewrite_children(self, node: Any) -> Any:
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, list):
                rewritten = [self.rewrite(item) if isinstance(item, _ast.AST) else item for item in value]
                if not self.inside and value and isinstance(value[0], _ast.stmt):
                    rewritten = [
                        item for statement in rewritten for item in (statement, apply_after(statement))
                    ]
                    if node.__class__ is _ast.Module:
                        rewritten.pop()
                setattr(node, field, rewritten)
            elif isinstance(value, _ast.AST):
                setattr(node, field, self.rewrite(value))
        return node

    def after_changes(self, value: Any) -> Any:
        """Return an expression that brings arguments up to date before it is evaluated."""
        both = place(_ast.Tuple([call_of("apply ", [], value), value], _ast.Load()), value)
        return place(_ast.Subscript(both, constant(1, value), _ast.Load()), value)

    def noted_chain(self, node: Any, name: str, steps: list[Any]) -> Any:
        """Return a chain that is evaluated as it is, and whose value is noted.

        If a class is called, its object has to be one of it.
        """
        for step in steps:
            if step.__class__ is _ast.Call:
                step.args = [self.rewrite(item) for item in step.args]
                for keyword in step.keywords:
                    keyword.value = self.rewrite(keyword.value)
        is_object = self.kinds[name] == "class" and len(steps) == 1 and steps[0].__class__ is _ast.Call
        return call_of("note ", [node, steps[0].func] if is_object else [node], node)

    def question(self, node: Any, name: str, steps: list[Any]) -> Any:
        items = []
        for step in steps:
            if step.__class__ is _ast.Attribute:
                items.append(
                    place(_ast.List([constant("a", node), constant(step.attr, node)], _ast.Load()), node)
                )
                continue
            arguments = place(_ast.List([self.rewrite(item) for item in step.args], _ast.Load()), node)
            names = [keyword.arg and constant(keyword.arg, node) for keyword in step.keywords]
            values = [self.rewrite(keyword.value) for keyword in step.keywords]
            keywords = place(_ast.Dict(names, values), node)
            items.append(place(_ast.List([constant("c", node), arguments, keywords], _ast.Load()), node))
        return call_of("evaluate ", [constant(name, node), place(_ast.List(items, _ast.Load()), node)], node)

    def strict(self, node: Any) -> Any:
        """Return the call that takes the place of an operation whose operands may decide it, or None."""
        kind = node.__class__
        if kind is _ast.Compare and len(node.ops) == 1:
            operation = constant(OPERATIONS[node.ops[0].__class__.__name__], node)
            operands = [self.rewrite(node.left), self.rewrite(node.comparators[0])]
            return call_of("compare ", [operation, *operands], node)
        if kind is _ast.BinOp:
            operation = constant(OPERATIONS[node.op.__class__.__name__], node)
            return call_of("operate ", [operation, self.rewrite(node.left), self.rewrite(node.right)], node)
        if kind is _ast.Assert and node.test.__class__ is _ast.Subscript:
            operands = [self.rewrite(node.test.value), self.rewrite(node.test.slice)]
            node.test = call_of("operate ", [constant("getitem", node), *operands], node)
            return node
        if kind in (_ast.FunctionDef, _ast.With):
            self.depth += 1
            node = self.rewrite_children(node)
            self.depth -= 1
            return node
        if kind is _ast.Assert and self.depth:
            node.test = call_of("held ", [self.rewrite(node.test)], node.test)
            return node
        if kind is _ast.Match:
            node.subject = call_of("subject ", [node.subject], node.subject)
            return self.rewrite_children(node)
        if kind is _ast.Call and not (
            node.func.__class__ is _ast.Name and node.func.id in CALLED_AS_THEY_ARE
        ):
            node = self.rewrite_children(node)
            function = node.func
            node.func = place(_ast.Name("call ", _ast.Load()), node)
            node.args.insert(0, function)
            return node
        return None


def place(new: Any, old: Any) -> Any:
    for name in PLACE:
        setattr(new, name, getattr(old, name))
    return new


def constant(value: Any, node: Any) -> Any:
    return place(_ast.Constant(value), node)


def call_of(name: str, arguments: list[Any], node: Any) -> Any:
    return place(_ast.Call(place(_ast.Name(name, _ast.Load()), node), arguments, []), node)


def apply_after(statement: Any) -> Any:
    return place(_ast.Expr(call_of("apply ", [], statement)), statement)
