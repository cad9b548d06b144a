"""Captions to token numbers: a small byte-pair tokenizer trained on the captions themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

PAD, BOS, EOS = "<pad>", "<start>", "<end>"
LENGTH = 16
VOCABULARY = 512


def train_tokenizer(captions: Iterable[str], vocabulary: int = VOCABULARY) -> str:
    """Train on captions (lower case, split at spaces and punctuation) and return the tokenizer as JSON text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    return tokenizer.to_str()


@dataclass
class CaptionTokenizer:
    """Captions -> (B, length) token numbers: start, text (cut to fit), end, padding."""

    json: str = field(repr=False)
    length: int = LENGTH

    def __post_init__(self) -> None:
        self._tokenizer = Tokenizer.from_str(self.json)
        self.vocabulary = self._tokenizer.get_vocab_size()
        self.pad, self.bos, self.eos = (self._tokenizer.token_to_id(token) for token in (PAD, BOS, EOS))

    def __call__(self, captions: list[str]) -> Tensor:
        rows = []
        for encoding in self._tokenizer.encode_batch(captions, add_special_tokens=False):
            tokens = [self.bos, *encoding.ids[: self.length - 2], self.eos]
            rows.append(tokens + [self.pad] * (self.length - len(tokens)))
        return torch.tensor(rows, dtype=torch.long).reshape(-1, self.length)

    def decode(self, tokens: Tensor) -> str:
        """The text of one row of token numbers."""
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True).strip()
