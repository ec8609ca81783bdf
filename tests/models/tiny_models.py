"""Tiny random models of transformers with a tokenizer of a few words, written as Hugging Face writes them."""

import random
import string
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

WORDS = ("the a cat dog bird sees chases likes big small red old house tree and or not very here there").split()
_BERT = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
_BERT |= {"vocab_size": 32, "max_position_embeddings": 40, "initializer_range": 0.3}
_VIT = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
_VIT |= {"image_size": 8, "patch_size": 4}


def sentence(rng: random.Random, length: int = 8) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(length))


def sentences(num: int, seed: int = 0) -> list[str]:
    """Of 3 to 12 words."""
    rng = random.Random(seed)
    return [sentence(rng, rng.randint(3, 12)) for _ in range(num)]


def tokenizer(marks: bool) -> Any:
    """Words to numbers; with `marks`, [CLS] and [SEP] around a text."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[END]"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if marks:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    names = {"pad_token": "[PAD]"} if marks else {"eos_token": "[END]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", **names)


def write(folder: Path, model: Any, tokenizer: Any | None = None) -> str:
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def write_encoder(folder: Path, with_tokenizer: bool = True) -> str:
    torch.manual_seed(0)
    return write(folder, BertModel(BertConfig(**_BERT)), tokenizer(marks=True) if with_tokenizer else None)


def write_text_classifier(folder: Path, num_labels: int = 2, **config: Any) -> str:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**_BERT, num_labels=num_labels, **config))
    return write(folder, model, tokenizer(marks=True))


def write_language_model(folder: Path, with_tokenizer: bool = True) -> str:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=32)
    return write(folder, GPT2LMHeadModel(config), tokenizer(marks=False) if with_tokenizer else None)


def write_image_classifier(folder: Path, num_labels: int = 3, **config: Any) -> str:
    torch.manual_seed(0)
    return write(folder, ViTForImageClassification(ViTConfig(**_VIT, num_labels=num_labels, **config)))


def write_image_encoder(folder: Path) -> str:
    torch.manual_seed(0)
    return write(folder, ViTModel(ViTConfig(**_VIT)))


def write_gguf(file: Path) -> str:
    """A language model as llama.cpp keeps it: matrices in blocks of 8 bits, norms in full, a tokenizer inside."""
    writer, generator = gguf.GGUFWriter(str(file), "llama"), np.random.default_rng(0)
    sizes = {"block_count": 1, "embedding_length": 32, "feed_forward_length": 64, "head_count": 2, "head_count_kv": 2}
    for name, value in {**sizes, "context_length": 128, "rope_dimension_count": 16, "vocab_size": 40}.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*string.ascii_letters[:37], "ab", "cd", "<|endoftext|>"])
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(39)
    writer.add_bos_token_id(39)
    square, wide = ("attn_q", "attn_k", "attn_v", "attn_output"), {"ffn_gate": 64, "ffn_up": 64}
    shapes = {f"blk.0.{name}": (wide.get(name, 32), 32) for name in (*square, *wide)} | {"blk.0.ffn_down": (32, 64)}
    for name, shape in (shapes | {"token_embd": (40, 32)}).items():
        values = gguf.quantize(generator.standard_normal(shape, np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", values, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)
