"""
An environment behind OpenEnv's protocol as an agent: reset, then a step for each turn of the model. A reset with the
same seed, as in a resume, must give the same episode; the second run after step 0 checks it. A row of the data is a
seed, so that the samples of a group, whose rewards are compared, are of one episode.

    uv pip install openenv-core                    # 0.3.0; its openai replaces the 2.6.1 of SGLang, which still works
    OPENENV_URL=http://127.0.0.1:8000 python train_grpo.py --agent=examples/openenv_env.py:solve ..

The server must hold a step's samples at once (max_concurrent_envs, 1 in OpenEnv's template): it hangs up on others.
"""

import os
import random

from openenv.core.generic_client import GenericEnvClient

SEEN, SAID = os.environ.get("OPENENV_FIELDS", "text message").split()  # of this environment's observations and actions


async def solve(chat, row):
    async with GenericEnvClient(base_url=os.environ["OPENENV_URL"]) as env:
        result = await env.reset(seed=random.Random(str(row)).getrandbits(31))
        while not result.done:
            chat.user(str(result.observation[SEEN]))
            reply = await chat.generate()
            if reply.truncated:
                break
            result = await env.step({SAID: reply.text})
            if result.reward is not None:
                chat.reward(result.reward)
    return 0.0  # beside its turns' rewards
