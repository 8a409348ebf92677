"""
examples/calculator.py as a program, with OpenAI's own client: the policy answers its requests.

    python train_grpo.py --agent="python examples/client.py" --init_from=out/run/ckpt/step_000100 ..
"""

import json
import os

from openai import OpenAI

NUMBER = {"type": "integer"}
ADD = {
    "name": "add",
    "description": "Adds two whole numbers.",
    "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
}


def run(call):
    """The text that a call of the tool gives."""
    try:
        arguments = json.loads(call.function.arguments)
        return str(arguments["a"] + arguments["b"])
    except (KeyError, TypeError) as error:  # a model may write anything
        return f"Error: {type(error).__name__}: {error}"


def main():
    row, client = json.loads(os.environ["ROW"]), OpenAI()  # its address and its key are in the environment, too
    messages = [{"role": "user", "content": row["prompt"]}]
    while True:  # a dialogue that has come to its end gets no calls
        asked = dict(messages=messages, tools=[{"type": "function", "function": ADD}])
        reply = client.chat.completions.create(model="policy", **asked).choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            break
        messages += [{"role": "tool", "tool_call_id": call.id, "content": run(call)} for call in reply.tool_calls]
    print(float(reply.content == row["answer"]))  # the reward


if __name__ == "__main__":
    main()
