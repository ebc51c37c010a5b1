"""Components shared by language models with partially synchronised layers."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "config": ["StackConfig"],
  "model": ["StackedLanguageModel"],
  "module": ["LanguageModule"],
  "stateful": ["StatefulConfig", "StatefulLanguageModel"],
  "vocabulary": ["Vocabulary"],
})
