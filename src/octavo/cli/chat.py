"""`octavo chat`: a conversation in the terminal, with a model in this process or on a running server.

At a terminal every line is a turn; Ctrl-C stops the answer, not the program. Otherwise stdin as a whole is one
prompt (with --lines, every line is a turn) and stdout gets the answers alone.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator

from octavo.cli.flags import Parser, add_config_flags, config_from, given_options
from octavo.cli.talk import ServerTalker, Settings, Talker
from octavo.config import all_options
from octavo.errors import ConfigError, RequestError

_HELP = "/reset forgets the conversation, /exit ends (as does Ctrl-D), Ctrl-C stops an answer."


def add_flags(parser: Parser) -> None:
    group = parser.add_argument_group("conversation")
    group.add_argument("--url", help="talk to the server at this address, such as http://127.0.0.1:8000")
    group.add_argument("--api-key", dest="server_key", metavar="KEY", help="key of that server (also: OCTAVO_API_KEY)")
    group.add_argument("--system", metavar="TEXT", help="system message")
    group.add_argument("--max-tokens", metavar="N", type=int, help="longest answer (default: the room in the context)")
    group.add_argument("--temperature", metavar="X", type=float, help="default: the model's own")
    group.add_argument("--top-p", metavar="X", type=float, help="default: the model's own")
    group.add_argument(
        "--lines", action="store_true", help="piped input: every line is a turn, not the whole one prompt"
    )
    group.add_argument(
        "--stats", action="store_true", help="after each answer, write tokens, speed and cache hits to stderr"
    )
    add_config_flags(parser, [option.name for option in all_options().values() if option.section != "server"])


def run(args: argparse.Namespace) -> int:
    is_interactive = sys.stdin.isatty()
    settings = Settings(args.max_tokens, args.temperature, args.top_p)
    with contextlib.closing(_talker(args, settings)) as talker:
        conversation = Conversation(talker, args.system, show_stats=args.stats)
        if is_interactive:
            conversation.interact()
        else:
            piped = sys.stdin.read().rstrip("\r\n")
            conversation.read(piped.splitlines() if args.lines else [piped])
    return 0


def _talker(args: argparse.Namespace, settings: Settings) -> Talker:
    if args.url is None:
        if args.server_key is not None:
            raise ConfigError("--api-key is for a server; it needs --url.")
        config = config_from(args)
        if sys.stderr.isatty():
            print(f"loading {config.model.model} ...", file=sys.stderr)
        from octavo.cli.local_talker import LocalTalker  # heavy: a server needs no engine here

        return LocalTalker(config, settings)
    useless = set(given_options(args)) - {"model"}
    if useless or args.config is not None:
        flag = all_options()[min(useless)].flag if useless else "--config"
        raise ConfigError(f"{flag} has no effect with --url: the server has its own.")
    return ServerTalker(args.url, given_options(args).get("model"), args.server_key, settings)


class Conversation:
    """The turns so far, and the ways to add one."""

    def __init__(self, talker: Talker, system: str | None, *, show_stats: bool) -> None:
        self._talker = talker
        self._system = [{"role": "system", "content": system}] if system is not None else []
        self._show_stats = show_stats
        self.messages: list[dict[str, str]] = list(self._system)

    def read(self, prompts: list[str]) -> None:
        """Answer each prompt on stdout, one after the other; an error ends the command."""
        for prompt in prompts:
            if prompt.strip():
                for text in self.turn(prompt):
                    print(text, end="", flush=True)
                print()

    def interact(self) -> None:
        """Turns from the terminal, until /exit or the end of the input."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history for input()
        print(f"{self._talker.model}. {_HELP}")
        while True:
            try:
                line = input(">>> ").strip()
            except KeyboardInterrupt:
                print("\n(/exit or Ctrl-D ends)")
                continue
            except EOFError:
                print()
                return
            if line in ("/exit", "/quit"):
                return
            if line == "/reset":
                self.messages = list(self._system)
            elif line.startswith("/"):
                print(_HELP)
            elif line:
                self._answer(line)

    def _answer(self, prompt: str) -> None:
        try:
            for text in self.turn(prompt):
                print(text, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print(" ... (stopped)")
        except RequestError as error:
            print(f"error: {error}", file=sys.stderr)

    def turn(self, prompt: str) -> Iterator[str]:
        """The answer to `prompt` in pieces. What was shown joins the conversation, also when it was stopped."""
        asked = [*self.messages, {"role": "user", "content": prompt}]
        shown: list[str] = []
        began_s = time.monotonic()
        first_s: float | None = None
        try:
            for text in self._talker.answer(asked):
                first_s = first_s or time.monotonic()
                shown.append(text)
                yield text
        finally:
            if shown:
                self.messages = [*asked, {"role": "assistant", "content": "".join(shown)}]
        if self._show_stats and first_s is not None:
            self._print_stats(began_s, first_s)

    def _print_stats(self, began_s: float, first_s: float) -> None:
        usage, ended_s = self._talker.usage, time.monotonic()
        speed = (usage.output_tokens - 1) / (ended_s - first_s) if usage.output_tokens > 1 else 0.0
        print(
            f"\n[{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached; first token after "
            f"{1000 * (first_s - began_s):.0f} ms; {usage.output_tokens} tokens, {speed:.1f} a second; "
            f"ended by {usage.finish_reason}]",
            file=sys.stderr,
        )
