"""The contract of a layer, with every rule that it takes; a kind has more tests in its own file."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from razorctl import Recipe, restore, sparsify
from razorctl.layers.by_type import swaps
from razorctl.layers.shared_copies.memo import Memo
from razorctl.rules.registry import RULES
from tests.cases import CASES, stock

# One of the layers that share their code, which all go through `..._equals_stock`.
KINDS = (
    *("linear", "patches", "conv", "grouped conv", "layer norm", "rms norm", "gelu", "relu"),
    *("dropout", "functions", "layer scale", "attention, stored", "bert attention, sparse-flash"),
    "multihead attention, sparse-flash",
    *("transposed linear", "llama rms norm", "llama mlp"),
    *("transposed conv", "batchnorm", "groupnorm", "relu6", "max pool", "mean pool"),
    "torchvision squeeze and excitation",
)
# One of the rules that share their code; layers see of a rule what it packs, unpacks and learns.
RULE_NAMES = ("topk", "3-bit", "columns-bandit", "columns-bandit, centered", "topk, centered")
PAIRS = [(case, rule) for case in KINDS for rule in RULE_NAMES if CASES[case].fits(rule)]
# The rule that its methods give a layer.
USUAL = {
    case: "columns-bandit" if CASES[case].fits("columns-bandit") and CASES[case].exact else "topk"
    for case in CASES
}
every_layer = pytest.mark.parametrize("case", CASES)
every_kind = pytest.mark.parametrize("case", KINDS)
every_pair = pytest.mark.parametrize(("case", "rule"), PAIRS)
# Those whose statistics do not depend on the input then; test_batch_norm.py has them.
FIXED_IN_EVALUATION = [c for c in CASES if "batchnorm" in c and c != "bare batchnorm"]
PRECISIONS = [None, torch.bfloat16, torch.float16]
# Of fp16, 2^-11 a rounding; attention and norms make a few of them.
TOLERANCE = {None: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def run(layer: nn.Module, x: Tensor, precision: torch.dtype | None = None) -> list[Tensor]:
    """Output, the input's gradient and every parameter's, after a fixed cotangent."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(7)
    with torch.autocast(x.device.type, precision, enabled=precision is not None):
        y = first(layer(x))
    cotangent = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).sin()
    y.backward(cotangent.to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def assert_close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """Each tensor to a share of its norm, or of 3 % of the largest norm: the gradient of a
    bias of k, which softmax cancels, is nothing but rounding.
    """
    norms = [b.double().norm() for b in want]
    for a, b, norm in zip(got, want, norms, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert (a.double() - b.double()).norm() <= tolerance * max(norm, 0.03 * max(norms))


def test_every_swap_has_a_case():
    assert set(swaps()) <= {type(case.build()) for case in CASES.values()}


@every_layer
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_everything_kept_equals_stock(case, precision, device):
    for shape in CASES[case].shapes:
        layer = CASES[case].layer("dense", device=device)
        x = torch.randn(shape, device=device)
        got = run(layer, x, precision)
        assert_close(got, run(stock(layer), x, precision), TOLERANCE[precision])


@pytest.mark.parametrize(
    ("case", "precision"),
    [(case, None) for case in CASES] + [(c, p) for c in KINDS for p in PRECISIONS[1:]],
    ids=str,
)
def test_the_forward_pass_is_stock_and_so_is_what_is_exact(case, precision, device):
    for shape in CASES[case].shapes:
        layer = CASES[case].layer(USUAL[case], device=device)
        x = torch.randn(shape, device=device)
        got = run(layer, x, precision)
        layer = stock(layer)
        if CASES[case].attention == "stored":  # the stock attention that stores its probabilities
            eager(layer)
        want = run(layer, x, precision)
        assert got[0].dtype == want[0].dtype
        assert torch.equal(got[0], want[0])
        if CASES[case].exact:
            assert_close(got[1:2], want[1:2], TOLERANCE[precision])
        for (name, _), a, b in zip(layer.named_parameters(), got[2:], want[2:], strict=True):
            assert a.isfinite().all()
            if name == "bias":
                assert_close([a], [b], TOLERANCE[precision])


def eager(layer: nn.Module) -> None:
    if isinstance(layer, nn.MultiheadAttention):
        layer.register_forward_pre_hook(weighted, with_kwargs=True)
    elif hasattr(layer, "fused_attn"):
        layer.fused_attn = False
    else:
        layer.config._attn_implementation = "eager"


def weighted(module: nn.Module, args: tuple[Tensor, ...], kwargs: object) -> object:
    return args, {"need_weights": True}


@every_pair
@pytest.mark.parametrize("value", [0.0, 1e4, 1e30])
def test_degenerate_inputs_give_finite_gradients(case, rule, value, device):
    if value > 1e4 and (CASES[case].attention or "mlp" in case):
        pytest.skip("products of such activations are infinite in the stock forward pass too")
    layer = CASES[case].layer(rule, device=device)
    x = torch.full(CASES[case].shapes[0], value, device=device)
    for got in (run(layer, x), run(layer, x)):  # the second with what the first has taught
        assert all(t.isfinite().all() for t in got)


@every_pair
def test_no_tensor_of_a_pass_waits_for_the_garbage_collector(case, rule):
    layer, x = CASES[case].layer(rule), torch.randn(CASES[case].shapes[0])
    gc.freeze()
    gc.disable()
    try:
        run(layer, x)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [item for item in gc.garbage if isinstance(item, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


@every_kind
@pytest.mark.parametrize("how", ["shared", "tied"])
def test_a_layer_used_twice_and_tied_parameters_get_the_sum(case, how):
    layer = CASES[case].layer(USUAL[case])
    other = layer
    if how == "tied":  # another layer with the same parameters
        other = copy.deepcopy(layer)
        other.rules = layer.rules
        for name, module in layer.named_modules():
            other.get_submodule(name)._parameters = module._parameters
    inputs = [*torch.randn(2, *CASES[case].shapes[0])]
    twins = [copy.deepcopy(layer) for _ in inputs]
    twins[1].rules = twins[0].rules
    torch.manual_seed(0)
    outputs = [first(m(x.detach().requires_grad_())) for m, x in zip(twins, inputs, strict=True)]
    for y in outputs:
        y.square().sum().backward()
    alone = [[p.grad for p in twin.parameters()] for twin in twins]
    torch.manual_seed(0)
    layers = (layer, other)
    outputs = [first(m(x.detach().requires_grad_())) for m, x in zip(layers, inputs, strict=True)]
    sum(y.square().sum() for y in outputs).backward()
    for p, a, b in zip(layer.parameters(), *alone, strict=True):
        torch.testing.assert_close(p.grad, a + b, rtol=1e-4, atol=1e-4)


@every_kind
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_runs_it_again(case, reentrant):
    plain = CASES[case].layer(USUAL[case])
    twin = copy.deepcopy(plain)
    x = torch.randn(CASES[case].shapes[0])
    inputs = [x.clone().requires_grad_() for _ in "ab"]
    if not reentrant:
        plain(x.clone().requires_grad_())  # whose draw the second pass replaces
    torch.manual_seed(5)
    first(plain(inputs[0])).square().sum().backward()
    torch.manual_seed(5)
    first(checkpoint(twin, inputs[1], use_reentrant=reentrant)).square().sum().backward()
    # The first pass of a reentrant one runs without grad, so with the stock fused attention.
    want, got = (
        [x.grad, *(p.grad for p in m.parameters())]
        for x, m in zip(inputs, (plain, twin), strict=True)
    )
    assert_close(got, want, 1e-5 if reentrant else 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_draws_leave_dropout_alone(reentrant):
    plain = nn.Sequential(
        nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Dropout(0.5)
    )
    twin = copy.deepcopy(plain)
    sparsify(twin, Recipe("prebackrazor"))
    x = torch.randn(8, 16, requires_grad=True)
    torch.manual_seed(1)
    plain(x).square().sum().backward()
    torch.manual_seed(1)
    checkpoint(twin, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(twin[3].bias.grad, plain[3].bias.grad)


@every_kind
def test_compiled_steps_equal_eager_ones(case, device):
    layer = CASES[case].layer(USUAL[case], device=device)
    twin = copy.deepcopy(layer)
    torch.compiler.reset()
    # With a partitioner, which must not make a draw anew in the backward pass.
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for step in range(2):
        x = torch.randn(CASES[case].shapes[0], device=device)
        inputs = [x.clone().requires_grad_() for _ in "ab"]
        for forward, module, a in ((compiled, twin, inputs[0]), (layer, layer, inputs[1])):
            module.zero_grad()
            torch.manual_seed(step)
            first(forward(a)).square().sum().backward()
        got, want = (
            [a.grad, *(p.grad for p in module.parameters())]
            for a, module in zip(inputs, (twin, layer), strict=True)
        )
        assert_close(got, want, 1e-5)


@pytest.mark.parametrize(
    ("case", "rule"),
    [("linear", rule) for rule in (*RULES, "topk, centered")]
    + [(case, USUAL[case]) for case in KINDS[1:]]
    + [("gelu", "3-bit")],
)
def test_on_the_meta_device(case, rule):
    # Nothing there has a value, so this also shows that a step never waits for the device.
    layer = CASES[case].layer(rule, device="meta")
    x = torch.randn(CASES[case].shapes[0], device="meta", requires_grad=True)
    first(layer(x)).sum().backward()
    assert x.grad.shape == x.shape
    assert all(p.grad.shape == p.shape for p in layer.parameters())


@pytest.mark.parametrize("case", [case for case in CASES if case not in FIXED_IN_EVALUATION])
def test_evaluation_and_no_grad_are_stock(case):
    layer = CASES[case].layer("dense")
    layer.rules = None  # whoever asks it fails
    x = torch.randn(CASES[case].shapes[0], requires_grad=True)
    with torch.no_grad():
        assert not first(layer(x)).requires_grad
    y = first(layer.eval()(x))
    assert torch.equal(y, first(stock(layer)(x)))


@every_kind
def test_frozen_layers_pass_on_a_gradient_and_get_none(case):
    layer = CASES[case].layer(USUAL[case]).requires_grad_(False)
    x = torch.randn(CASES[case].shapes[0], requires_grad=True)
    first(layer(x)).square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad is None for p in layer.parameters())
    torch.manual_seed(0)
    y = first(layer(x.detach()))  # nothing asks for a gradient
    assert not y.requires_grad


@pytest.mark.parametrize("case", [c for c in KINDS if list(CASES[c].build().parameters())])
def test_an_input_without_gradient(case):
    layer = CASES[case].layer(USUAL[case])
    first(layer(torch.randn(CASES[case].shapes[0]))).square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("case", [c for c in KINDS if "bert" not in c])  # which cannot, stock
def test_an_empty_batch(case):
    shape = (0, *CASES[case].shapes[0][1:])
    layer = CASES[case].layer(USUAL[case])
    x = torch.zeros(shape, requires_grad=True)
    first(layer(x)).sum().backward()
    assert x.grad.shape == shape
    assert all(not p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize("case", [case for case in CASES if case in KINDS or "norm" in case])
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16, torch.float64])
def test_low_and_high_precision_modules(case, precision, device):
    layer = CASES[case].layer(USUAL[case], device=device).to(precision)
    x = torch.randn(CASES[case].shapes[0], device=device, dtype=precision, requires_grad=True)
    first(layer(x)).square().mean().backward()
    for grad in (x.grad, *(p.grad for p in layer.parameters())):
        assert grad.dtype == precision
        assert grad.isfinite().all()
    exact = CASES[case].layer("dense", device=device).to(precision)
    small = (x * 0.05).detach()  # to which what a norm adds to the variance matters
    want = run(stock(copy.deepcopy(exact)), small)
    tolerance = TOLERANCE.get(precision, 1e-6)
    assert_close(run(exact, small), want, 2 * tolerance if CASES[case].attention else tolerance)


@pytest.mark.parametrize(
    "case", [c for c in (*KINDS, "pointwise", "same conv") if not CASES[c].attention]
)
def test_any_layout_of_the_input(case, device):
    layer = CASES[case].layer(USUAL[case], device=device)
    x = torch.randn(CASES[case].shapes[0], device=device)
    last = x.transpose(0, 1).contiguous().transpose(0, 1)
    if x.dim() == 4:
        last = x.to(memory_format=torch.channels_last)
    twin = copy.deepcopy(layer)
    got, want = run(twin, last), run(layer, x)
    wrong = case == "mean pool" and device.type == "cuda"  # torch's own gradient, as of 2.11
    if case not in ("dropout", "functions") and not wrong:  # which drop by the order in memory
        assert_close(got, want, TOLERANCE[None])


# The linear layers of an MLP are stock here, and follow autocast.
@pytest.mark.parametrize(
    "case", [name for name in KINDS if not (CASES[name].attention or "mlp" in name)]
)
def test_backward_under_autocast_is_the_same(case):
    x = torch.randn(CASES[case].shapes[0])
    grads = []
    torch.manual_seed(1)
    original = CASES[case].layer(USUAL[case])
    for inside in (False, True):
        torch.manual_seed(0)
        layer, a = copy.deepcopy(original), x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            with torch.autocast("cpu", enabled=False):
                y = first(layer(a))
            y.square().sum().backward()
        grads.append([a.grad, *(p.grad for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("case", [case for case in KINDS if case != "mean pool"])  # which has none
def test_hooks_get_all_that_is_saved(case):
    layer = CASES[case].layer(USUAL[case])
    layer.memo = Memo()
    x, saved = torch.randn(CASES[case].shapes[0], requires_grad=True), []

    def take(t: Tensor) -> Tensor:
        saved.append(weakref.ref(t))
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(take, lambda t: t):
        y = first(layer(x))
    layer.memo.clear()
    addresses = {x.data_ptr(), y.data_ptr(), *(p.data_ptr() for p in layer.parameters())}
    held = [t for ref in saved if (t := ref()) is not None]
    assert saved
    assert {t.data_ptr() for t in held} <= addresses


@every_kind
def test_a_second_derivative_is_refused(case):
    layer = CASES[case].layer(USUAL[case])
    x = torch.randn(CASES[case].shapes[0], requires_grad=True)
    (dx,) = torch.autograd.grad(first(layer(x)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.sum().backward()


@every_layer
def test_copies_and_pickles_keep_working(case):
    model = nn.Sequential(CASES[case].build())
    original = type(model[0])
    names = list(model.state_dict())
    attributes = [set(vars(module)) for module in model.modules()]
    sparsify(model, Recipe("razor", attention=CASES[case].attention or "auto"))
    x = torch.randn(CASES[case].shapes[0], requires_grad=True)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin[0]) is type(model[0])
        assert list(twin.state_dict()) == names
        first(twin(x)).sum().backward()
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            assert p.grad is not None
            assert p is not q
        restore(twin)
        assert type(twin[0]) is original
        assert [set(vars(module)) for module in twin.modules()] == attributes
