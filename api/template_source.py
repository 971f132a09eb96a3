"""What --chat-template may be: the path of a Jinja file, or the template itself."""

from pathlib import Path

from trunkline.errors import ConfigError


def chat_template_source(given: str) -> str:
    """The template's text. Raises ConfigError if it is a path and cannot be read."""
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--chat-template is {given!r}, which is no template and no file that can be read: {error}. Give the path of a Jinja"
            " file, or the template itself."
        ) from None
