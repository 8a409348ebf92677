"""
Programs to write (--dataset=programs, or a data set with tests as its answers) by a model that may try them out: it
has Python in a sandbox as a tool, and its last turn is judged by the tests.

    python train_grpo.py config/programs.py --agent=examples/programmer.py:solve --tool_call_parser=pythonic \\
        --max_prompt_tokens=64 --max_new_tokens=256 --out_dir=out/programmer
"""

from onecurve.graders.sandbox import code, python


async def solve(chat, row):
    chat.user(row["prompt"])
    reply = await chat.generate(tools=[python])
    while reply.tool_calls:
        await chat.call(reply.tool_calls)
        reply = await chat.generate()
    passed, _ = await chat.do(code, row["prompt"], reply.text, row["answer"])
    return passed


def replies(row):
    """A program that is tried out, and then given."""
    return [[("python", dict(code=f"{row['program']}\nprint(f(1))"))], row["program"]]
