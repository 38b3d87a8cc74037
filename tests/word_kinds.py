"""Tiny tokenizers of every kind of decoder, trained on a few lines."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = (
    "the cat and the hat How many birds fly in the wood?",
    "def add(a, b):\n    return a + b\n",
    "naïve 漢字 你好 🙂🙂 <think>x</think>",
    "  two  spaces\n\n",
)
SPECIAL = ("<unk>", "<s>", "</s>", "<think>")
PIECES = {  # decoders of SentencePiece's kind: Llama 2's, Gemma's, and one that replaces behind Fuse
    "llama2": (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)),
    "gemma": (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
    "late": (decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)),
}
NAMES = (
    "byte_level",
    "byte_level_prefix",
    "metaspace_always",
    "metaspace_first",
    "metaspace_never",
    "unigram",
    "word_piece",
    "bpe_suffix",
    "words",
    "ctc",
    *PIECES,
)


def made(name: str) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a name of NAMES. Ids 0 to 3 are SPECIAL, of which the kinds of PIECES have three."""
    if name in PIECES:
        return _pieces(name)
    how, special = {"show_progress": False}, list(SPECIAL)
    if name == "unigram":
        words = tokenizers.Tokenizer(models.Unigram())
        words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", **how)
    elif name == "word_piece":
        words = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        words.pre_tokenizer, words.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=special, **how)
    elif name == "words":
        words = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(special_tokens=special, **how)
    elif name == "bpe_suffix":
        words = tokenizers.Tokenizer(models.BPE(end_of_word_suffix="</w>"))
        words.pre_tokenizer, words.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder("</w>")
        trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=special, end_of_word_suffix="</w>", **how)
    elif name.startswith("byte_level"):
        words = tokenizers.Tokenizer(models.BPE())
        words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=name.endswith("prefix"))
        words.decoder = decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=letters, **how)
    else:
        words, scheme = tokenizers.Tokenizer(models.BPE()), name.rpartition("_")[2] if name != "ctc" else "never"
        words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        words.decoder = decoders.Metaspace(prepend_scheme=scheme)
        trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=special, **how)
        if name == "ctc":
            words.decoder = decoders.CTC(pad_token="<s>", word_delimiter_token="▁")
    words.train_from_iterator(TEXTS * 5, trainer)
    return words


def _pieces(name: str) -> tokenizers.Tokenizer:
    """A BPE with bytes, whose pieces begin with ▁."""
    words = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    words.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    special = [*SPECIAL[:3], *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False)
    words.train_from_iterator(TEXTS[:2] * 3, trainer)
    about = json.loads(words.to_str())
    about["model"] |= {"byte_fallback": True, "fuse_unk": True}
    about["pre_tokenizer"], about["added_tokens"] = None, about["added_tokens"][:3]
    words = tokenizers.Tokenizer.from_str(json.dumps(about))
    words.decoder = decoders.Sequence(list(PIECES[name]))
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return words
