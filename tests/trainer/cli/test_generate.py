"""`blockdraft generate`."""

import re

from blockdraft.trainer.cli.main import main


def test_generate_answers_and_counts(draft_dir, target_dir, capsys):
    command = ["generate", str(target_dir), str(draft_dir), "hello there", "--max_new_tokens", "6"]
    assert main(command) == 0
    answer, counts = capsys.readouterr().out.rsplit("\n[", 1)
    assert answer and re.match(r"\d tokens in \d rounds: (tau \d.\d\d, )?\d+.\d tokens/s]", counts)
    sampled = [*command, "--temperature", "0.7", "--top_p", "0.9", "--seed", "1"]
    assert main(sampled) == 0
    first = capsys.readouterr().out.rsplit("\n[", 1)[0]
    assert main(sampled) == 0
    assert capsys.readouterr().out.rsplit("\n[", 1)[0] == first
