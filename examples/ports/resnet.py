"""ResNet-18 and -34: a state dict of torchvision's into lazy layers, whatever its widths and classes are."""

import jax
from flax import nnx

import lazymods as lm

SAME = ((1, 1), (1, 1))  # PyTorch's padding=1; "SAME" pads otherwise at stride 2


class Block(nnx.Module):
    def __init__(self, width: int, stride: int, *, rngs: nnx.Rngs):
        self.conv1 = lm.LazyConv(width, (3, 3), strides=stride, padding=SAME, use_bias=False, rngs=rngs)
        self.conv2 = lm.LazyConv(width, (3, 3), padding=SAME, use_bias=False, rngs=rngs)
        self.bn1, self.bn2 = lm.LazyBatchNorm(momentum=0.9, rngs=rngs), lm.LazyBatchNorm(momentum=0.9, rngs=rngs)
        self.downsample = nnx.data(None)
        if stride > 1:
            shortcut = lm.LazyConv(width, (1, 1), strides=stride, use_bias=False, rngs=rngs)
            self.downsample = nnx.Sequential(shortcut, lm.LazyBatchNorm(momentum=0.9, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.bn2(self.conv2(nnx.relu(self.bn1(self.conv1(x)))))
        return nnx.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nnx.Module):
    def __init__(self, depths: tuple[int, ...] = (2, 2, 2, 2), *, width: int = 64, classes: int = 1000, rngs: nnx.Rngs):
        self.conv1 = lm.LazyConv(width, (7, 7), strides=2, padding=((3, 3), (3, 3)), use_bias=False, rngs=rngs)
        self.bn1 = lm.LazyBatchNorm(momentum=0.9, rngs=rngs)
        for i, depth in enumerate(depths):
            blocks = [Block(width << i, 2 if i and not j else 1, rngs=rngs) for j in range(depth)]
            setattr(self, f"layer{i + 1}", nnx.Sequential(*blocks))
        self.fc = lm.LazyLinear(classes, rngs=rngs)
        self.stages = len(depths)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return the logits `(batch, classes)` of images `(batch, height, width, channels)`."""
        x = nnx.relu(self.bn1(self.conv1(images)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=SAME)  # type: ignore[arg-type]  Flax says str
        for i in range(self.stages):
            x = getattr(self, f"layer{i + 1}")(x)
        return self.fc(x.mean((1, 2)))


def load(path: str, depths: tuple[int, ...] = (2, 2, 2, 2), *, width: int = 64, classes: int = 1000) -> ResNet:
    """Return the model of a file, as it is used: by its running statistics."""
    model = ResNet(depths, width=width, classes=classes, rngs=nnx.Rngs(0))
    lm.load(model, path, layout="torch")
    model.eval()
    return model
