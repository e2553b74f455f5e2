"""Private names of libraries: all that razorctl uses are listed here, and libraries have them.

A name is private if one of its parts begins with a single underscore. A release of a library may
take it away, so a public name is better where there is one. "torch" below is torch 2.11 to 2.15.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from inspect import getsource
from pkgutil import resolve_name

import pytest

from tests.test_guards import FILES, nodes

# What names are for: why no public name does it, then the names. Attributes of objects are listed
# with a class, an object or a module of the library that has them.
USES = """
calls of ops past the dispatcher when nothing observes them: torch.library dispatches every call
  torch._C._AutoDispatchBelowAutograd torch._C._len_torch_dispatch_stack
  torch._C._autograd._profiler_enabled
autograd inside an op: below the dispatcher, torch.enable_grad alone records nothing
  torch._C.DispatchKey.ADInplaceOrView torch._C.DispatchKey.AutogradFunctionality
  torch._C._SetExcludeDispatchKeyGuard
stock layers under torch.func, forward-mode AD and torch.fx: nothing public tells that they run
  torch._C._functorch.peek_interpreter_stack torch.autograd.forward_ad._current_level
  torch.fx._symbolic_trace.is_fx_symbolic_tracing
subclasses of Tensor that compute later: torch documents these names alone for them
  torch.Tensor._make_wrapper_subclass torch._C.DisableTorchFunctionSubclass
traces of operations: torch documents TorchDispatchMode, and exports it nowhere public
  torch.utils._python_dispatch.TorchDispatchMode torch._C.DisableTorchFunction
real tensors inside a trace, for layers tried on values: nothing public suspends modes
  torch.utils._python_dispatch._disable_current_modes torch.utils._mode_utils.no_dispatch
traces without values: torch.export makes fake tensors, and hands none out
  torch._subclasses.fake_tensor.FakeTensor torch._subclasses.fake_tensor.FakeTensorMode
  torch._subclasses.fake_tensor.FakeCopyMode
reasons why a trace ends: their public base, RuntimeError, has no `func`
  torch._subclasses.fake_tensor.DataDependentOutputException
  torch._subclasses.fake_tensor.DynamicOutputShapeException
  torch._subclasses.fake_tensor.UnsupportedOperatorException
tensors inside arguments and results of any form: torch has no public module for trees
  torch.utils._pytree.tree_flatten torch.utils._pytree.tree_leaves
  torch.utils._pytree.tree_map_only torch.utils._pytree.tree_structure
  torch.utils._pytree.tree_unflatten
whether, and in which, backward pass code runs, and what it runs: torch.autograd.graph tells none
  torch._C._current_graph_task_id torch._C._autograd._get_current_graph_task_keep_graph
  torch._C._will_engine_execute_node
the hooks for saved tensors that are active: saved_tensors_hooks sets them, nothing reads them
  torch._C._autograd._top_saved_tensors_default_hooks
a backward pass in a mode: torch.autograd.backward leaves a TorchFunctionMode
  torch.autograd.Variable._execution_engine
an error at a second derivative: once_differentiable raises it for a dy that requires grad alone
  torch._C._functions.DelayedError
code that no compiled graph holds: torch.compiler.disable imports torch._dynamo with the module,
and its `reason` cannot name the block
  torch._disable_dynamo torch._dynamo.graph_break
copies that compiled layers share: torch.compiler has no code that runs while it traces
  torch._dynamo.comptime.comptime
failures of a compiler, after which training goes on: torch.compiler exports no such errors
  torch._dynamo.exc.FailOnRecompileLimitHit torch._dynamo.exc.TorchDynamoException
compiled activation checkpointing: torch.compiler.config has no memory budget
  torch._functorch.config.activation_memory_budget torch._functorch.config.patch
products of int8: torch.nn.functional.scaled_mm takes fp8 and fp4 alone
  torch._int_mm torch.ops.aten._int_mm
a card that is busy while a timing queues its launches: torch.cuda has no public wait
  torch.cuda._sleep
CUDA's allocations over time: memory_snapshot() tells of one moment; these two are documented
  torch.cuda.memory._dump_snapshot torch.cuda.memory._record_memory_history
modules that FSDP2 gathers, wherever they are: isinstance of FSDPModule needs a module first
  torch.distributed._composable_state._module_state_mapping
the stock masks and checks of nn.MultiheadAttention: public functions only apply them
  torch.nn.functional._canonical_mask torch.nn.functional._mha_shape_check
every norm with running statistics: apex's SyncBatchNorm derives from no public class
  torch.nn.modules.batchnorm._NormBase
the statistics of F.batch_norm: torch.native_batch_norm returns them, but never runs cuDNN
  torch._batch_norm_impl_index
a tensor that is no view of its storage's first owner: clone() copies it
  torch.ops.aten._unsafe_view
gradients of adaptive pooling without its input: autograd wants the input
  torch.ops.aten._adaptive_avg_pool2d_backward torch.ops.aten._adaptive_avg_pool3d_backward
numbers that matchers read of tensors without values: torch names the operation so
  torch.ops.aten._local_scalar_dense.default
operations that a trace counts: torch runs them for public ones, and names them so
  torch.ops.aten._fused_sgd_.default torch.ops.aten._native_batch_norm_legit
  torch.ops.aten._softmax torch.ops.aten._softmax_backward_data
  torch.ops.aten._log_softmax_backward_data torch.ops.aten._fused_rms_norm_backward
  torch.ops.aten._foreach_norm torch.ops.aten._foreach_zero_ torch.ops.aten._to_copy
  torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
  torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
  torch.ops.aten._scaled_dot_product_flash_attention
  torch.ops.aten._scaled_dot_product_flash_attention_backward
whether an operation changes arguments, and its schema: OpOverload has no public attribute for it
  torch.ops.aten.add.Tensor._schema
which tensors are views, and which have changed: torch documents `_base`, `_version` alone
  torch.Tensor._base torch.Tensor._version
the parts of a sparse tensor: indices() and values() refuse one that is not coalesced
  torch.Tensor._indices torch.Tensor._values
whether a gradient is observed: register_hook adds a hook, nothing lists hooks
  torch.Tensor._backward_hooks torch.autograd.graph.Node._register_hook_dict
hooks of copied modules, whose handles are lost: Module has no list of hooks
  torch.nn.Module._forward_hooks torch.nn.Module._forward_pre_hooks
what a module itself holds, None too, and swaps in place: named_parameters() leaves None out
  torch.nn.Module._modules torch.nn.Module._parameters torch.nn.Module._buffers
  torch.nn.Module._compiled_call_impl
steps of a stock forward that its razor class runs: forward() runs all steps
  torch.nn.BatchNorm2d._check_input_dim torch.nn.Conv2d._conv_forward
  torch.nn.TransformerEncoderLayer._sa_block torch.nn.TransformerEncoderLayer._ff_block
  torch.nn.TransformerDecoderLayer._mha_block torchvision.ops.SqueezeExcitation._scale
  peft.tuners.tuners_utils.BaseTunerLayer._cast_input_dtype
timm's norms that may call APEX: is_fast_norm() is of new layers
  timm.layers.LayerNorm._fast_norm
AdamW with stochastic rounding in bf16: torchao exports it under this name alone
  torchao.optim._AdamW
torchao's int8 training, mended for torch: its public layer calls this function
 torchao.prototype.quantized_training.int8_mixed_precision._Int8MixedPrecisionTrainingLinearFunction
attention that a model runs, its masks, and who asks for its weights: transformers only sets them
  transformers.PreTrainedConfig._attn_implementation
  transformers.masking_utils._ignore_causal_mask_sdpa
  transformers.utils.output_capturing._active_collector.get
whether inputs already require gradients: enable_input_require_grads() does not tell
  transformers.PreTrainedModel._require_grads_hooks
the forward inside accelerate's wrapper: remove_hook_from_module() removes the wrapper
  accelerate.hooks._old_forward
the key of a data set's rows in a cache: datasets has no other that costs no pass over rows
  datasets.Dataset._fingerprint
Triton's key of a launch: JITFunction.warmup() computes it for the present card alone
  triton.runtime.JITFunction._pack_args
"""


def purposes() -> dict[str, str]:
    """Each listed name with its purpose."""
    uses: dict[str, str] = {}
    text, begun = "", False
    for line in USES.strip().splitlines():
        if line.startswith(" "):
            uses |= dict.fromkeys(line.split(), text)
        else:
            text = f"{text} {line}" if begun else line
        begun = not line.startswith(" ")
    return uses


NAMES = purposes()
PUBLIC = {"_asdict", "_fields", "_make", "_replace"}  # of named tuples
# Parts of other names, as text.
PARTS = {"_", "_MAPPING_NAMES", "_bytes", "_column", "_ctx", "_data_files", "_int8", "_norm"}
PARTS |= {"_s", "_token_id", "_weight"}


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


def inherited(node: ast.AST) -> ast.AST | None:
    """The target of an annotation without value, as of an attribute of a class of a library."""
    return node.target if isinstance(node, ast.AnnAssign) and node.value is None else None


def asked(node: ast.AST) -> Iterator[str]:
    """The attributes that an expression asks of an object, also by text, as for getattr."""
    texts: tuple[object, ...] = (getattr(inherited(node), "id", None),)
    if isinstance(node, ast.Attribute | ast.Constant | ast.keyword):
        texts = tuple(getattr(node, name, None) for name in ("attr", "arg", "value"))
    yield from (str(text) for text in texts if is_private(text) and str(text).isidentifier())


def defined(node: ast.AST) -> str | None:
    """The name that a statement or a target defines, of an attribute of self too."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    own = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return node.attr if own and dotted(node.value) in ("self", "cls") else None


@cache
def used() -> tuple[Counter[str], Counter[str]]:
    """The private names of modules and classes of libraries, and those of objects, with sites."""
    names, attributes = Counter[str](), Counter[str]()
    bare = {file: {*map(inherited, nodes(file))} for file in FILES}
    own = {f: {defined(n) for n in nodes(f) if n not in bare[f]} for f in FILES}
    ours = set().union(*own.values())
    for file in FILES:
        roots: dict[str, str] = {}
        for node in nodes(file):
            roots |= imported(node)
        inner = {node.value for node in nodes(file) if isinstance(node, ast.Attribute)}
        for node in nodes(file):
            first, _, rest = (dotted(node) or "").partition(".")
            if first not in roots:
                of_self = dotted(getattr(node, "value", None)) in ("self", "cls")
                mine = ours if of_self else own[file]
                attributes.update({*asked(node)} - mine - PUBLIC - PARTS)
            elif node not in inner:
                names[f"{roots[first]}.{rest}".rstrip(".")] += 1
    names = Counter({n: count for n, count in names.items() if any(map(is_private, n.split(".")))})
    return names, attributes


def test_private_names_are_listed():
    names, attributes = used()
    others = NAMES.keys() - names.keys()
    assert not names.keys() - NAMES.keys()
    assert sorted(name.rpartition(".")[2] for name in others) == sorted(attributes)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_libraries_have_them(name: str):
    library, (owner, _, last) = name.partition(".")[0], name.rpartition(".")
    pytest.importorskip(library)
    try:
        place = resolve_name(owner)
        # Objects get some attributes only when they are made; modules have theirs.
        has = hasattr(place, last) or (
            name not in used()[0] and re.search(rf"\b{last}\b", getsource(place)) is not None
        )
    except (ImportError, AttributeError, TypeError):
        has = False
    assert has, f"{library} {version(library)} has no {name}. It is for {NAMES[name]}."
