"""Chat rows, and files of them."""

import json


def chat(*answers, **fields):
    turns = [({"role": "user", "content": "hello"}, {"role": "assistant", "content": answer}) for answer in answers]
    return {"messages": [message for turn in turns for message in turn], **fields}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
