"""Networks in PyTorch, written by hand, for ports of kinds that the gallery does not have."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d, pad, silu


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.act = nn.PReLU(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Any) -> Any:
        return self.act(self.conv(silu(self.norm(x)))) + self.skip(x)


class UNet(nn.Module):
    """Down by a stride, up by transposed convolutions with ``output_padding`` and with a dilation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.down = nn.ModuleList([ResidualBlock(8, 8), ResidualBlock(8, 16)])
        self.pool = nn.Conv2d(8, 8, 4, stride=2, padding=1)
        self.mid = nn.Sequential(nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.GroupNorm(4, 16), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=1)
        self.wide = nn.ConvTranspose2d(8, 8, 5, padding=1, dilation=2, bias=False)
        self.norm, self.head = nn.InstanceNorm2d(8, affine=True), nn.Conv2d(16, 2, 1)

    def forward(self, x: Any) -> Any:
        skip = self.down[0](self.stem(x))
        y = torch.cat([self.up(self.mid(self.down[1](self.pool(skip)))), skip], 1)
        return self.head(y), self.norm(self.wide(y[:, :8]))


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, factor: int):
        super().__init__()
        width = inputs * factor
        self.is_residual = stride == 1 and inputs == outputs
        depthwise = nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False)
        self.conv = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6()),
            *(depthwise, nn.BatchNorm2d(width), nn.ReLU6()),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )

    def forward(self, x: Any) -> Any:
        return x + self.conv(x) if self.is_residual else self.conv(x)


class MobileNet(nn.Module):
    """Depthwise convolutions, a flatten of a map, BatchNorm of features."""

    def __init__(self) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        blocks = [InvertedResidual(8, 8, 1, 2), InvertedResidual(8, 12, 2, 3), InvertedResidual(12, 12, 1, 2)]
        self.features = nn.Sequential(stem, *blocks)
        head = [nn.Linear(48, 16), nn.BatchNorm1d(16), nn.Hardswish(), nn.Linear(16, 5)]
        self.classifier = nn.Sequential(nn.Dropout(0.2), *head)

    def forward(self, x: Any) -> Any:
        return self.classifier(adaptive_avg_pool2d(self.features(x), (2, 2)).flatten(1))


class Seq2Seq(nn.Module):
    """An encoder and a decoder, and attention to what is of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.src, self.tgt = nn.Embedding(11, 16, padding_idx=0), nn.Embedding(13, 16)
        self.net = nn.Transformer(16, 4, 2, 2, 24, dropout=0.0, activation="gelu", batch_first=True)
        self.look = nn.MultiheadAttention(16, 4, kdim=6, vdim=6, batch_first=True)
        self.out = nn.Linear(16, 13)

    def forward(self, source: Any, target: Any, image: Any) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.net(self.src(source), self.tgt(target), tgt_mask=mask)
        return self.out(x + self.look(x, image, image, need_weights=False)[0])


class WaveNet(nn.Module):
    """Dilated causal convolutions under weight norm, old or new, and what they are conditioned on."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.emb, self.inp = nn.EmbeddingBag(9, 6, mode="sum"), norm(nn.Conv1d(3, 8, 1))
        self.filters = nn.ModuleList([norm(nn.Conv1d(8, 16, 2, dilation=2**i)) for i in range(3)])
        self.cond = nn.ModuleList([norm(nn.Linear(6, 16)) for _ in range(3)])
        self.skip = nn.ModuleList([norm(nn.Conv1d(8, 8, 1)) for _ in range(3)])
        self.bn, self.up = nn.BatchNorm1d(8), norm(nn.ConvTranspose1d(8, 4, 4, stride=2, padding=1))
        self.depth, self.act = norm(nn.Conv1d(4, 4, 3, padding=1, groups=4)), nn.PReLU()
        self.post = nn.Sequential(nn.LeakyReLU(0.1), norm(nn.Conv1d(4, 2, 1)), nn.Tanh())
        self.rnn = nn.LSTM(2, 3, 2, batch_first=True, bidirectional=True)

    def forward(self, x: Any, ids: Any) -> Any:
        c, x, total = self.emb(ids), self.inp(x), 0
        for i in range(3):
            a, b = (self.filters[i](pad(x, (2**i, 0))) + self.cond[i](c)[:, :, None]).chunk(2, 1)
            y = self.skip[i](torch.tanh(a) * torch.sigmoid(b))
            total, x = total + y, x + y
        out = self.post(self.act(self.depth(self.up(self.bn(total)))))
        return self.rnn(out.transpose(1, 2))[0]
