"""Code that the configuration of a run names: verbs that take runs from elsewhere run it on request alone."""

from typing import Literal

from detonation.models.pretrained import HUB_PREFIX
from detonation.train.recipe.schema import Config

Section = Literal["model", "data", "optimizer", "scheme"]


def require_trust(trusted: bool, config: Config, where: str, verb: str, *sections: Section) -> None:
    """Raises `ValueError` where `verb` would run code that `config` names, unless it is `trusted`.

    Args:
        where: The name of the place that `config` is from, for the error.
        sections: Those of `config` that the verb builds.
    """
    named = {
        # No code of a model of transformers runs. The prefix means nothing elsewhere: `hf:build` is of a module `hf`.
        "model": [config.model.name] if not config.model.name.startswith(HUB_PREFIX) else [],
        "data": [config.data.name],
        "optimizer": [config.optimizer.name],
        "scheme": [level.scheme.name for level in config.levels],
    }
    code = [name for section in sections for name in named[section] if ":" in name]
    if code and not trusted:
        raise ValueError(f"{where} names the code {code[0]}, which {verb} would run: say --trust-code if you trust it")
