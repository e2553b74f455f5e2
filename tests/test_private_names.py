"""Private names of libraries: all that razorctl uses are listed here, and libraries have them.

A name is private if one of its parts begins with a single underscore. A release of a library may
take it away, so a public name is better where there is one.
"""

import ast
from collections.abc import Iterator
from pkgutil import resolve_name

import pytest

from tests.test_guards import FILES, nodes

NAMES = {
    "torch.Tensor._make_wrapper_subclass",
    "torch._C.DisableTorchFunction",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C.DispatchKey.ADInplaceOrView",
    "torch._C.DispatchKey.AutogradFunctionality",
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._SetExcludeDispatchKeyGuard",
    "torch._C._autograd._get_current_graph_task_keep_graph",
    "torch._C._autograd._profiler_enabled",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._current_graph_task_id",
    "torch._C._functions.DelayedError",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._len_torch_dispatch_stack",
    "torch._batch_norm_impl_index",
    "torch._disable_dynamo",
    "torch._dynamo.comptime.comptime",
    "torch._dynamo.exc.FailOnRecompileLimitHit",
    "torch._dynamo.exc.TorchDynamoException",
    "torch._dynamo.graph_break",
    "torch._functorch.config.activation_memory_budget",
    "torch._functorch.config.patch",
    "torch._int_mm",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.FakeCopyMode",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException",
    "torch.autograd.Variable._execution_engine",
    "torch.autograd.forward_ad._current_level",
    "torch.cuda._sleep",
    "torch.cuda.memory._dump_snapshot",
    "torch.cuda.memory._record_memory_history",
    "torch.distributed._composable_state._module_state_mapping",
    "torch.fx._symbolic_trace.is_fx_symbolic_tracing",
    "torch.nn.functional._canonical_mask",
    "torch.nn.functional._mha_shape_check",
    "torch.nn.modules.batchnorm._NormBase",
    "torch.ops.aten._fused_sgd_.default",
    "torch.ops.aten._unsafe_view",
    "torch.utils._mode_utils.no_dispatch",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_structure",
    "torch.utils._pytree.tree_unflatten",
    "torchao.optim._AdamW",
    "torchao.prototype.quantized_training.int8_mixed_precision._Int8MixedPrecisionTrainingLinearFunction",
    "transformers.utils.output_capturing._active_collector.get",
}
# Attributes of objects of libraries, and operations of aten.
ATTRIBUTES = {
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "_attn_implementation",
    "_backward_hooks",
    "_base",
    "_buffers",
    "_cdata",
    "_fast_norm",
    "_fingerprint",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_ignore_causal_mask_sdpa",
    "_indices",
    "_int_mm",
    "_modules",
    "_native_batch_norm_legit",
    "_pack_args",
    "_parameters",
    "_register_hook_dict",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_schema",
    "_softmax",
    "_softmax_backward_data",
    "_values",
    "_version",
}
PUBLIC = {"_asdict", "_fields", "_make", "_replace"}  # of named tuples


def is_private(part: object) -> bool:
    return isinstance(part, str) and part.startswith("_") and not part.startswith("__")


def imported(node: ast.AST) -> dict[str, str]:
    """The libraries' names that a statement imports, by the names that they get."""
    if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("razorctl"):
        return {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    if isinstance(node, ast.Import):
        parts = [(each.asname, each.name) for each in node.names]
        return {
            new or name.split(".")[0]: name if new else name.split(".")[0] for new, name in parts
        }
    return {}


def dotted(node: ast.AST) -> str | None:
    """The source of a name or of an attribute of one; None for any other expression."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return inner and f"{inner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def asked(node: ast.AST) -> Iterator[str]:
    """The attributes that an expression asks of another object than self."""
    if isinstance(node, ast.Attribute) and dotted(node.value) not in ("self", "cls"):
        yield node.attr
    if isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr"):
        yield from (each.value for each in node.args[1:2] if isinstance(each, ast.Constant))


def defined(node: ast.AST) -> str | None:
    """The name that a statement or a target defines, of an attribute of self too."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    own = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return node.attr if own and dotted(node.value) in ("self", "cls") else None


def used() -> tuple[set[str], set[str]]:
    """The private names of modules and classes of libraries, and those of objects."""
    names, attributes = set(), set()
    for file in FILES:
        roots: dict[str, str] = {}
        own = {defined(node) for node in nodes(file)}
        for node in nodes(file):
            roots |= imported(node)
        names |= {*roots.values()}
        for node in nodes(file):
            first, _, rest = (dotted(node) or "").partition(".")
            if first in roots and isinstance(node, ast.Attribute):
                names.add(f"{roots[first]}.{rest}")
            else:
                attributes |= {*filter(is_private, asked(node))} - own
    names = {name for name in names if any(map(is_private, name.split(".")))}
    inner = {name.rpartition(".")[0] for name in names}  # of which an attribute is listed
    return names - inner, attributes - PUBLIC


def test_private_names_are_listed():
    names, attributes = used()
    assert names == NAMES
    assert attributes == ATTRIBUTES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_libraries_have_them(name: str):
    resolve_name(name)
