"""
An environment of verifiers as an agent, inside the process; ENVIRONMENT names it, and the run's rows are its questions:

    uv pip install verifiers==0.1.10 openai==2.6.1    # SGLang's openai; verifiers 0.4 has no load_environment
    ENVIRONMENT=my_env python train_grpo.py --agent=examples/verifiers_env.py:solve --prompt_column=question ..
"""

import contextvars
import functools
import inspect
import os

import verifiers

ENV = verifiers.load_environment(os.environ["ENVIRONMENT"])
raised = contextvars.ContextVar("raised")  # a sample's own, as many are under way


def noted(function):
    """The reward function; verifiers makes a 0 of what it raises, so that is kept, and ends the run."""

    @functools.wraps(function)
    async def call(*args, **kwargs):
        try:
            value = function(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value
        except Exception as error:
            raised.get().append(error)
            raise

    return call


for rubric in getattr(ENV.rubric, "rubrics", [ENV.rubric]):
    rubric.funcs = [noted(function) for function in rubric.funcs]


async def solve(chat, row):
    system = [dict(role="system", content=ENV.system_prompt)] if ENV.system_prompt else []
    prompt = [*system, dict(role="user", content=row["prompt"])]
    raised.set(errors := [])
    async with chat.openai() as client:
        task = dict(prompt=prompt, answer=row["answer"], example_id=0, task="default")
        output = await ENV.run_rollout(task, client, "policy", {})
    if output["error"] and output["error"]["error"] == "EmptyModelResponseError":
        return 0.0  # an error to verifiers; but a policy that says nothing is no failure
    if errors or output["error"]:
        raise errors[0] if errors else RuntimeError(output["error"])
    return output["reward"]
