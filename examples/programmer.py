"""
Programs to write (--dataset=programs, or a data set with tests as its answers) by a model that may try them out: it
has Python in a sandbox as a tool, and its last turn is judged by the tests.
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
