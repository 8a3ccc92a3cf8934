"""A ``flatten=`` that was forgotten is told by the load, which looks at the forward; the values are PyTorch's."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_model, spec
from jax.core import Tracer

import lazymods as lm

torch = pytest.importorskip("torch", reason="PyTorch tells the values")

CONV = torch.nn.Conv2d(3, 5, 3, padding=1)
LINEAR, NORM = torch.nn.Linear(5 * 2 * 3, 2), torch.nn.BatchNorm1d(5 * 2 * 3).eval()
X = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0))
IMAGE = jnp.asarray(X.numpy().transpose(0, 2, 3, 1))
POOL = torch.nn.MaxPool2d(2)


@torch.no_grad()
def by_torch(*after: Any) -> np.ndarray:
    return torch.nn.Sequential(CONV, POOL, *after)(X).numpy()


WANTED = by_torch(torch.nn.ReLU(), torch.nn.Flatten(), LINEAR)


class Net(nnx.Module):
    """Convolution, pooling, whatever brings the map to the linear layer."""

    def __init__(self, flatten: Callable[[jax.Array], jax.Array] = lambda x: x.reshape(len(x), -1)) -> None:
        self.conv = lm.LazyConv2d(5, 3, rngs=nnx.Rngs(0))
        self.fc = lm.LazyLinear(2, rngs=nnx.Rngs(0))
        self.flatten = flatten

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(self.flatten(nnx.relu(nnx.max_pool(self.conv(x), (2, 2), (2, 2)))))


def state(**modules: Any) -> dict[str, np.ndarray]:
    return {f"{n}.{k}": v.detach().numpy() for n, m in modules.items() for k, v in m.state_dict().items()}


FILE = state(conv=CONV, fc=LINEAR)
TEXT = (
    "the mapping: fc of Net: the input is flattened channels last, and the weight was loaded as one of PyTorch, which "
    "flattens channels first: the output is wrong. Write flatten={'fc': (height, width, 5)}, or {'fc': (30,)} if "
    "PyTorch flattens as the model does"
)


def loaded(model: Any, file: dict[str, np.ndarray] | None = None, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.load(model, FILE if file is None else file, layout="torch", **options)
    return model


def flat(x: jax.Array) -> jax.Array:
    return x.reshape(len(x), -1)


@pytest.mark.parametrize("ready", [False, True])
def test_the_load_tells_and_leaves_nothing_behind(ready: bool) -> None:
    model = Net(flat)
    if ready:
        lm.materialize(model, spec(1, 4, 6, 3))
    with pytest.warns(UserWarning) as caught:
        lm.load(model, FILE, layout="torch")
    assert [str(w.message) for w in caught] == [TEXT]
    assert np.abs(np.asarray(model(IMAGE)) - WANTED).max() > 0.01
    explicit = Net(flat)
    lm.materialize(explicit, spec(1, 4, 6, 3))
    nnx.update(explicit, nnx.state(model))
    assert_same_model(model, explicit)


def test_a_warning_that_is_an_error_undoes_the_load() -> None:
    model = Net(flat)
    with pytest.raises(UserWarning, match="the output is wrong"):
        loaded(model)
    assert lm.uninitialized_paths(model) == lm.uninitialized_paths(Net(flat))


@pytest.mark.parametrize(("side", "pool"), [(4, True), (12, True), (64, False)])
def test_square_maps_are_told_exactly(side: int, pool: bool) -> None:
    sizes = (side // 2, side // 2, 5) if pool else (64, 64, 5)
    linear = torch.nn.Linear(sizes[0] * sizes[1] * 5, 2)

    class Square(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.conv(x)
            return self.fc(flat(nnx.max_pool(x, (2, 2), (2, 2)) if pool else x))

    model = Square()
    with pytest.warns(UserWarning) as caught:
        lm.load(model, state(conv=CONV, fc=linear), layout="torch")
    assert f"Write flatten={{'fc': {sizes}}}, or" in str(caught[0].message)
    lm.load(model, state(conv=CONV, fc=linear), layout="torch", flatten={"fc": sizes})
    x = torch.randn(1, 3, side, side)
    with torch.no_grad():
        wanted = linear((POOL(CONV(x)) if pool else CONV(x)).flatten(1)).numpy()
    np.testing.assert_allclose(model(jnp.asarray(x.numpy().transpose(0, 2, 3, 1))), wanted, atol=1e-5)


def test_maps_of_one_and_three_axes() -> None:
    class Deep(nnx.Module):
        def __init__(self, rank: int) -> None:
            self.conv = lm.LazyConv(5, (3,) * rank, rngs=nnx.Rngs(0))
            self.fc = lm.LazyLinear(2, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.fc(self.conv(x).reshape(len(x), -1))

    for rank, sizes in ((1, (6,)), (3, (2, 2, 2))):
        conv = {1: torch.nn.Conv1d, 3: torch.nn.Conv3d}[rank](3, 5, 3)
        linear = torch.nn.Linear(5 * int(np.prod(sizes)), 2)
        with pytest.warns(UserWarning, match=rf"Write flatten={{'fc': \({', '.join(map(str, sizes))}, 5\)}}"):
            lm.load(Deep(rank), state(conv=conv, fc=linear), layout="torch")


def test_the_line_that_it_gives_is_right() -> None:
    flatten = {"fc": (2, 3, 5)}
    model = loaded(Net(flat), flatten=flatten)
    np.testing.assert_allclose(model(IMAGE), WANTED, atol=1e-5)


def test_who_says_that_the_order_is_the_same_is_told_nothing() -> None:
    assert np.array_equal(loaded(Net(flat), flatten={"fc": (30,)}).fc.kernel[...], FILE["fc.weight"].T)


RIGHT = {
    "channels first before the flatten": lambda x: jnp.moveaxis(x, -1, 1).reshape(len(x), -1),
    "another order on purpose": lambda x: x.transpose(0, 2, 1, 3).reshape(len(x), -1),
}


@pytest.mark.parametrize("flatten", RIGHT.values(), ids=list(RIGHT))
def test_a_model_that_brings_the_axes_in_an_order_of_its_own_is_told_nothing(flatten: Any) -> None:
    out = loaded(Net(flatten))(IMAGE)
    if flatten is RIGHT["channels first before the flatten"]:
        np.testing.assert_allclose(out, WANTED, atol=1e-5)


WAYS = {
    "ravel": lambda x: jax.vmap(jnp.ravel)(x),
    "collapse": lambda x: jax.lax.collapse(x, 1),
    "relu after it": lambda x: nnx.relu(x.reshape(len(x), -1)),
    "under jit": lambda x: jax.jit(lambda x: nnx.relu(x * 2).reshape(len(x), -1))(x),
    "two steps": lambda x: x.reshape(len(x), 2, -1).reshape(len(x), -1),
    "a cast": lambda x: x.astype(jnp.bfloat16).reshape(len(x), -1).astype(jnp.float32),
    "dropout": lambda x: nnx.Dropout(0.5, deterministic=True)(x.reshape(len(x), -1)),
    "a concatenation": lambda x: jnp.concatenate([x[..., :2], x[..., 2:]], -1).reshape(len(x), -1),
}


@pytest.mark.parametrize("flatten", WAYS.values(), ids=list(WAYS))
def test_it_is_seen_through_what_leaves_the_order(flatten: Any) -> None:
    with pytest.warns(UserWarning, match="fc of Net"):
        lm.load(Net(flatten), FILE, layout="torch")


def test_pooled_maps_and_tokens_need_no_flatten() -> None:
    class Pooled(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.conv(x)
            return self.fc(jnp.concatenate([y.mean((1, 2)), y.max((1, 2))], -1))

    class Tokens(Net):
        def __init__(self) -> None:
            super().__init__()
            self.proj = lm.LazyLinear(5, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:  # tokens have the same order in PyTorch
            tokens = self.proj(self.conv(x).reshape(len(x), -1, 5))
            return self.fc(tokens.reshape(len(x), -1))

    pooled = torch.nn.Linear(10, 2)
    model = loaded(Pooled(), state(conv=CONV, fc=pooled))
    maps = by_torch_map()
    wanted = pooled(torch.cat([maps.mean((2, 3)), maps.amax((2, 3))], -1)).detach().numpy()
    np.testing.assert_allclose(model(IMAGE), wanted, atol=1e-5)
    linear, proj = torch.nn.Linear(5 * 24, 2), torch.nn.Linear(5, 5)
    model = loaded(Tokens(), state(conv=CONV, fc=linear, proj=proj))
    wanted = linear(proj(maps.flatten(2).transpose(1, 2)).flatten(1)).detach().numpy()
    np.testing.assert_allclose(model(IMAGE), wanted, atol=1e-5)


def by_torch_map() -> Any:
    with torch.no_grad():
        return CONV(X)


def test_a_norm_after_the_flatten_needs_it_as_well() -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.bn = lm.LazyBatchNorm(use_running_average=True, epsilon=1e-5, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.fc(self.bn(nnx.max_pool(self.conv(x), (2, 2), (2, 2)).reshape(len(x), -1)))

    with torch.no_grad():
        for value in (NORM.running_mean, NORM.weight, NORM.bias):
            value.copy_(torch.randn(30, generator=torch.Generator().manual_seed(1)))
    file = FILE | state(bn=NORM)
    for flatten in (None, {"bn": (2, 3, 5)}, {"fc": (2, 3, 5)}):
        with pytest.warns(UserWarning) as caught:
            lm.load(Normed(), file, layout="torch", flatten=flatten)
        names = sorted({"bn", "fc"} - set(flatten or ()))
        assert sorted(str(caught[0].message).split(": ")[1].removesuffix(" of Normed").split(", ")) == names
    sizes = {"bn": (2, 3, 5), "fc": (2, 3, 5)}
    model = loaded(Normed(), file, flatten=sizes)
    np.testing.assert_allclose(model(IMAGE), by_torch(torch.nn.Flatten(), NORM, LINEAR), atol=1e-4)
    for name, value in lm.export_torch(model, flatten=sizes).items():
        assert np.array_equal(value, file[name])


def test_flatten_takes_the_names_of_a_sequential_and_lists_those_that_there_are() -> None:
    def model() -> nnx.Module:
        layers = lm.LazyConv2d(5, 3, rngs=nnx.Rngs(0)), nnx.relu, flat, lm.LazyLinear(2, rngs=nnx.Rngs(0))
        return nnx.Dict(net=nnx.Sequential(*layers))

    linear = torch.nn.Linear(5 * 24, 2)
    net = torch.nn.Sequential(CONV, torch.nn.ReLU(), torch.nn.Flatten(), linear)
    for name in ("net.3", "net.layers.3"):
        loaded_one = loaded(model(), state(net=net), flatten={name: (4, 6, 5)})
        np.testing.assert_allclose(loaded_one["net"](IMAGE), net(X).detach().numpy(), atol=1e-5)
    with pytest.raises(lm.StateDictError, match=r"the name of a Linear, .* layer of the model: net\.3"):
        lm.load(model(), state(net=net), layout="torch", flatten={"fc": (4, 6, 5)})


def test_a_forward_that_takes_no_image_is_not_looked_at() -> None:
    class Labelled(Net):
        def __call__(self, x: jax.Array, label: Any = None) -> jax.Array:
            return super().__call__(x["image"])

    assert loaded(Labelled(flat)).fc.in_features == 30
    assert loaded(Net(lambda x: x / (1 // 0))).fc.in_features == 30


def test_the_forward_is_run_without_values_only() -> None:
    seen = []

    class Told(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            seen.append(isinstance(x, Tracer))
            self.calls = nnx.Param(jnp.ones(()))
            return super().__call__(x)

    model = Told(flat)
    with pytest.warns(UserWarning, match="fc of Told"):
        lm.load(model, FILE, layout="torch")
    assert seen and all(seen) and not hasattr(model, "calls")
    seen.clear()
    loaded(Told(flat), flatten={"fc": (2, 3, 5)})
    assert seen == []


# ---------------------------------------------------------------- a map that is made of a row


class Decoder(nnx.Module):
    def __init__(self, unflatten: Callable[[jax.Array], jax.Array], between: Any = lambda x: x) -> None:
        self.fc = lm.LazyLinear(5 * 2 * 3, rngs=nnx.Rngs(0))
        self.up = lm.LazyConvTranspose(4, (3, 3), padding=((1, 1), (1, 1)), rngs=nnx.Rngs(0))
        self.unflatten, self.between = unflatten, between

    def __call__(self, z: jax.Array) -> jax.Array:
        return self.up(nnx.relu(self.unflatten(self.between(self.fc(z)))))


def last(x: jax.Array) -> jax.Array:
    return x.reshape(len(x), 2, 3, 5)


def first(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x.reshape(len(x), 5, 2, 3), 1, -1)


Z = torch.randn(2, 7, generator=torch.Generator().manual_seed(2))
ROW, UP = torch.nn.Linear(7, 30), torch.nn.ConvTranspose2d(5, 4, 3, padding=1)
DECODED = UP(torch.relu(ROW(Z).view(-1, 5, 2, 3))).detach().numpy().transpose(0, 2, 3, 1)
ROW_FILE = state(fc=ROW, up=UP)


@pytest.mark.parametrize("prefix", ["", "decoder."])
def test_a_map_of_a_row_is_told_and_the_line_is_right(prefix: str) -> None:
    def model(unflatten: Any) -> Any:
        return nnx.Dict(decoder=Decoder(unflatten)) if prefix else Decoder(unflatten)

    file = {prefix + name: value for name, value in ROW_FILE.items()}
    with pytest.warns(UserWarning) as caught:
        lm.load(model(last), file, layout="torch")
    owner = "Dict" if prefix else "Decoder"
    assert [str(w.message) for w in caught] == [
        f"the mapping: {prefix}fc of {owner}: its output becomes a map (2, 3, 5), channels last, and was loaded as "
        "that of PyTorch, whose maps have channels first: the output is wrong. Write jnp.moveaxis(x.reshape(len(x), 5, "
        f"2, 3), 1, -1) for it, or flatten={{'{prefix}fc': (7,)}} if PyTorch's view is as the model's"
    ]
    right = loaded(model(first), file)
    np.testing.assert_allclose((right["decoder"] if prefix else right)(jnp.asarray(Z.numpy())), DECODED, atol=1e-5)
    same = loaded(model(last), file, flatten={f"{prefix}fc": (7,)})
    wanted = ROW(Z).view(-1, 2, 3, 5).permute(0, 3, 1, 2)
    wanted = UP(torch.relu(wanted)).detach().numpy().transpose(0, 2, 3, 1)
    np.testing.assert_allclose((same["decoder"] if prefix else same)(jnp.asarray(Z.numpy())), wanted, atol=1e-5)


@pytest.mark.parametrize("between", [nnx.relu, lambda x: jax.jit(nnx.silu)(x * 2)])
def test_a_map_of_a_row_is_seen_through_what_leaves_the_order(between: Any) -> None:
    with pytest.warns(UserWarning, match="fc of Decoder: its output becomes a map"):
        lm.load(Decoder(last, between), ROW_FILE, layout="torch")


def test_maps_that_are_no_rows_are_told_nothing() -> None:
    class Tokens(nnx.Module):
        def __init__(self) -> None:
            self.fc, self.up = lm.LazyLinear(10, rngs=nnx.Rngs(0)), lm.LazyConv2d(4, 3, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.up(self.fc(x).reshape(len(x), 2, 2, 10)[..., ::2])

    row, conv = torch.nn.Linear(7, 10), torch.nn.Conv2d(5, 4, 3, padding=1)
    loaded(Tokens(), state(fc=row, up=conv))
    loaded(Decoder(lambda x: x.reshape(len(x), 3, 2, 5).transpose(0, 2, 1, 3)), ROW_FILE)  # an order of its own


def test_an_image_that_becomes_a_row_and_a_map_again() -> None:
    class Coder(nnx.Module):
        def __init__(self) -> None:
            self.conv = lm.LazyConv2d(5, 3, rngs=nnx.Rngs(0))
            self.fc, self.out = lm.LazyLinear(30, rngs=nnx.Rngs(0)), lm.LazyConv2d(4, 3, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(last(self.fc(self.conv(x).mean((1, 2)))))

    row, out = torch.nn.Linear(5, 30), torch.nn.Conv2d(5, 4, 3, padding=1)
    with pytest.warns(UserWarning, match=r"fc of Coder: its output becomes a map \(2, 3, 5\)"):
        lm.load(Coder(), state(conv=CONV, fc=row, out=out), layout="torch")


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_all_of_an_autoencoder_is_looked_at_by_an_image_of_its_size(padding: str) -> None:
    """Two layers read the map; behind the first, an image of another size comes to no other layer."""

    class Coder(nnx.Module):
        def __init__(self, right: bool) -> None:
            self.right, one = right, nnx.Rngs(0)
            self.conv = lm.LazyConv2d(5, 3, strides=2, padding=(1 if padding == "SAME" else 0), rngs=one)
            self.mean, self.spread = lm.LazyLinear(4, rngs=one), lm.LazyLinear(4, rngs=one)
            self.row, self.out = lm.LazyLinear(45, rngs=one), lm.LazyConv2d(3, 3, rngs=one)

        def __call__(self, x: jax.Array) -> Any:
            x = flat(nnx.relu(self.conv(x)))
            mean, spread = self.mean(x), self.spread(x)
            row = self.row(mean)
            row = jnp.moveaxis(row.reshape(-1, 5, 3, 3), 1, -1) if self.right else row.reshape(-1, 3, 3, 5)
            return self.out(row), spread

    side = 6 if padding == "SAME" else 7
    conv = torch.nn.Conv2d(3, 5, 3, 2, padding=1 if padding == "SAME" else 0)
    mean, spread, row, out = (torch.nn.Linear(45, 4), torch.nn.Linear(45, 4), torch.nn.Linear(4, 45),
                              torch.nn.Conv2d(5, 3, 3, padding=1))  # fmt: skip
    file = state(conv=conv, mean=mean, spread=spread, row=row, out=out)
    sizes: dict[str, Any] = {"mean": (3, 3, 5), "spread": (3, 3, 5)}
    for flatten, names in (({}, ["mean, spread", "row"]), ({"mean": (3, 3, 5)}, ["spread", "row"]), (sizes, ["row"])):
        with pytest.warns(UserWarning) as caught:
            lm.load(Coder(False), file, layout="torch", flatten=flatten)
        assert [str(w.message).split(": ")[1].removesuffix(" of Coder") for w in caught] == names
    model = loaded(Coder(True), file, flatten=sizes)
    x = torch.randn(2, 3, side, side)
    with torch.no_grad():
        code = torch.relu(conv(x)).flatten(1)
        wanted = out(row(mean(code)).view(-1, 5, 3, 3)).permute(0, 2, 3, 1).numpy(), spread(code).numpy()
    for ours, theirs in zip(model(jnp.asarray(x.permute(0, 2, 3, 1).numpy())), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


# ---------------------------------------------------------------- one axis of a map stays, as the time of a spectrogram


class Spectra(nnx.Module):
    """Convolution, whose channels and frequencies become the features of each time step."""

    def __init__(self, layer: Callable[[], Any], order: tuple[int, ...] = (0, 2, 1, 3)) -> None:
        self.conv, self.rest, self.order = lm.LazyConv2d(5, 3, rngs=nnx.Rngs(0)), layer(), order

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv(x).transpose(self.order)
        return self.rest(x.reshape(*x.shape[:2], -1))


def gru() -> Any:
    return nnx.RNN(lm.LazyResetAfterGRUCell(2, rngs=nnx.Rngs(0)))


RESTS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "Linear": (torch.nn.Linear(20, 2), lambda: lm.LazyLinear(2, rngs=nnx.Rngs(0))),
    "GRU": (torch.nn.GRU(20, 2, batch_first=True), gru),
    "LSTM": (torch.nn.LSTM(20, 2, batch_first=True), lambda: nnx.RNN(lm.LazyLSTMCell(2, rngs=nnx.Rngs(0)))),
    "two directions": (
        torch.nn.GRU(20, 2, batch_first=True, bidirectional=True),
        lambda: nnx.Bidirectional(gru(), gru(), rngs=nnx.Rngs(0)),
    ),
}


@pytest.mark.parametrize("name", RESTS)
def test_a_time_step_of_a_spectrogram(name: str) -> None:
    layer, build = RESTS[name]
    file = state(conv=CONV, rest=layer)
    with torch.no_grad():
        wanted = layer(CONV(X).permute(0, 3, 1, 2).flatten(2))
    wanted = (wanted[0] if isinstance(wanted, tuple) else wanted).numpy()
    with pytest.warns(UserWarning) as caught:
        lm.load(Spectra(build), file, layout="torch")
    (text,) = [str(w.message) for w in caught]
    assert "Write flatten={'rest': (4, 5)}, or {'rest': (20,)} if" in text
    model = Spectra(build)
    result = lm.load(model, file, layout="torch", flatten={"rest": (4, 5)})
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(model(IMAGE), wanted, atol=1e-5)
    out = lm.export_torch(model, like=result)
    assert out.keys() == file.keys() and all(np.array_equal(out[key], value) for key, value in file.items())
    turned = Spectra(build, (0, 2, 3, 1))  # channels before frequencies, as in PyTorch
    loaded(turned, file)
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(turned(IMAGE), wanted, atol=1e-5)
