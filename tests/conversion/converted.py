"""Small models, converted by hand: every layer class and every format stands in one of them."""

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from gblr.conversion.replace import replace_layer
from gblr.layers.conv import ConvGeometry, GaudiConv2d, StructuredConv2d
from gblr.layers.gaudi import GaudiLinear
from gblr.layers.split import SplitLinear
from gblr.layers.structured import StructuredLinear
from gblr.matrices.blast import BlastMatrix
from gblr.matrices.low_rank import LowRankMatrix
from gblr.matrices.monarch import MonarchMatrix
from gblr.matrices.packed import PackedGBLR
from gblr.matrices.pixelfly import PixelflyMatrix, butterfly_support

TOKENS = torch.arange(14).view(2, 7)
IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=50,
        max_position_embeddings=16,
    )  # fmt: skip
    return BertModel(config).eval()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16)).eval()


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=50, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def vit() -> nn.Module:
    torch.manual_seed(0)
    config = ViTConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4
    )
    return ViTForImageClassification(config).eval()


def resnet() -> nn.Module:
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return ResNetForImageClassification(config).eval()


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def gaudi(layer: nn.Linear, relative_cost: float = 0.5, block_rank: int = 2) -> GaudiLinear:
    out_features, in_features = layer.weight.shape
    made = GaudiLinear(
        in_features, out_features, bias=layer.bias is not None, block_rank=block_rank, relative_cost=relative_cost
    )
    with torch.no_grad():
        made.location_frac.uniform_(0, 0.99)
    return made


def packed(layer: nn.Linear, relative_cost: float = 0.5) -> StructuredLinear:
    return StructuredLinear(PackedGBLR.from_gblr(gaudi(layer, relative_cost).to_matrix()), layer.bias)


def low_rank(out_features: int, in_features: int, rank: int = 3) -> LowRankMatrix:
    return LowRankMatrix(torch.randn(rank, out_features) / 6, torch.randn(rank, in_features) / 6)


def pixelfly(out_features: int, in_features: int) -> PixelflyMatrix:
    rows, cols = butterfly_support((4, 4), 4)
    blocks = torch.randn(len(rows), out_features // 4, in_features // 4) / 6
    low = low_rank(out_features, in_features, 2)
    return PixelflyMatrix(blocks, rows, cols, low.u, low.v, (4, 4))


def converted_bert() -> nn.Module:
    model = bert()
    attention, block = model.encoder.layer[0].attention, model.encoder.layer[0]
    attention.self.query = packed(attention.self.query, 0.3)
    attention.self.key = StructuredLinear(low_rank(32, 32), attention.self.key.bias)
    attention.self.value = StructuredLinear(pixelfly(32, 32), attention.self.value.bias)
    attention.output.dense = StructuredLinear(MonarchMatrix(torch.randn(2, 16, 8), torch.randn(2, 8, 16)))
    block.intermediate.dense = StructuredLinear(
        BlastMatrix(torch.randn(2, 32, 3), torch.randn(2, 16, 3), torch.randn(2, 2, 3)), block.intermediate.dense.bias
    )
    block.output.dense = StructuredLinear(gaudi(block.output.dense).to_matrix(), block.output.dense.bias)
    layer = gaudi(model.encoder.layer[1].output.dense)
    layer.set_sigma(7.0)
    model.encoder.layer[1].output.dense = layer
    return model.eval()


def converted_gpt2() -> nn.Module:
    model = gpt2()
    for block in model.transformer.h:
        parts = [packed(nn.Linear(32, 32)) for _ in range(2)]
        block.attn.c_attn = SplitLinear([*parts, nn.Linear(32, 32)])
        block.attn.c_proj = nn.Linear(32, 32)  # what densify_ leaves of a Conv1D: square, so shapes alone do not tell
        block.mlp.c_fc = StructuredLinear(low_rank(128, 32), torch.randn(128))
    return model.eval()


def converted_llama() -> nn.Module:
    model = llama()
    for block in model.model.layers:
        for name in ("q_proj", "k_proj"):
            setattr(block.self_attn, name, packed(getattr(block.self_attn, name)))
        block.mlp.up_proj = StructuredLinear(low_rank(64, 32))
    return model.eval()


def converted_vit() -> nn.Module:
    model = vit()
    for block in model.vit.layers:
        block.mlp.fc1 = packed(block.mlp.fc1)
    return model.eval()


def converted_resnet() -> nn.Module:
    model = resnet()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    first, last = model.get_submodule(names[1]), model.get_submodule(names[-1])
    matrix = low_rank(first.out_channels, first.weight[0].numel())
    model.set_submodule(names[1], StructuredConv2d(matrix, ConvGeometry.of(first)))
    made = GaudiConv2d(
        last.in_channels, last.out_channels, last.kernel_size, last.stride, last.padding, bias=False, block_rank=2
    )
    model.set_submodule(names[-1], made)
    return model.eval()


def converted_encoder() -> nn.Module:
    model = encoder()
    replace_layer(model, "layers.0.linear1", packed(model.layers[0].linear1))
    replace_layer(model, "layers.1.linear2", gaudi(model.layers[1].linear2))
    return model.eval()


def output(model: nn.Module) -> torch.Tensor:
    """The first output on fixed inputs, in the model's own dtype."""
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        if isinstance(model, (BertModel, GPT2LMHeadModel, LlamaForCausalLM)):
            return model(TOKENS)[0]
        if isinstance(model, nn.TransformerEncoder):
            return model(torch.linspace(-1, 1, 2 * 5 * 32).view(2, 5, 32).to(dtype))
        return model(IMAGES.to(dtype))[0]
