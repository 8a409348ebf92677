"""
Real clients, unmodified, against a served model; CI does not run it. Each gets an environment of its own by uv.

    python train_grpo.py config/calculator.py --mode=sft --max_steps=100 --out_dir=out/tiny_tools
    python tests/clients.py out/tiny_tools/ckpt/step_000100             # all of them: some ten minutes, 5 GB
    python tests/clients.py out/tiny_tools/ckpt/step_000100 openai litellm

It prints the table of docs/agents.md. A case works if the client takes the answer without an error: what a tiny model
says is nonsense, but a grammar makes it JSON. json_object alone is left out where the client parses it: the object that
such a model begins need not end.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEY = "a key of the tests"

HEAD = """
import asyncio, importlib.metadata, json, os, sys, warnings
warnings.filterwarnings("ignore")
MODEL, URL, KEY = os.environ["MODEL"], os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
works, refused = [], []
def case(name, function):
    try:
        result = function()
        result = asyncio.run(result) if asyncio.iscoroutine(result) else result
        assert result is not None and result is not False, result
        works.append(name)
    except BaseException as error:
        refused.append(f"{name} ({type(error).__name__})")
        print(name, " ".join(str(error).split())[:500], file=sys.stderr, flush=True)
SMALL = dict(type="object", properties=dict(n=dict(type="boolean")), required=["n"], additionalProperties=False)
TOOLS = [dict(type="function", function=dict(name="flip", description="Flips.", parameters=SMALL))]
TOLD = [dict(role="user", content="123+245=")]
"""
TAIL = """
print("RESULT" + json.dumps([importlib.metadata.version(PACKAGE), works, refused]), flush=True)
os._exit(0)
"""

# client: (its package, what is installed, cases)
CLIENTS = {}
CLIENTS["openai"] = (
    "openai",
    "openai pydantic",
    """
import openai, pydantic
c = openai.OpenAI()
class Small(pydantic.BaseModel):
    n: bool
chat = lambda **k: c.chat.completions.create(**dict(model="policy", messages=TOLD, max_tokens=100) | k)
complete = lambda **k: c.completions.create(**dict(model="policy", prompt="20+21=", max_tokens=5) | k)
case("chat", lambda: chat().choices[0].message.content is not None)
case("stream", lambda: [x for x in chat(stream=True, stream_options=dict(include_usage=True))][-1].usage)
case("tools", lambda: chat(tools=TOOLS))
one = dict(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)  # a tiny model may write calls for ever
case("tool_choice", lambda: chat(**one).choices[0].message.tool_calls[0])
case("named tool", lambda: chat(tools=TOOLS, tool_choice=dict(type="function", function=dict(name="flip"))))
case("json_object", lambda: chat(response_format=dict(type="json_object")))
parse = lambda **k: c.chat.completions.parse(model="policy", messages=TOLD, **k).choices[0].message.parsed
case("parse", lambda: parse(response_format=Small))
case("top_logprobs", lambda: chat(logprobs=True, top_logprobs=5).choices[0].logprobs.content[0].top_logprobs[4])
case("n, seed, stop", lambda: chat(n=3, seed=1, stop=["1"]).choices[2])
two = dict(prompt=["1+1=", "2+2="], echo=True, logprobs=2, max_tokens=0)
case("completions", lambda: complete(**two).choices[1].logprobs.top_logprobs[1])
case("models.retrieve", lambda: c.models.retrieve(c.models.list().data[0].id))
case("top_p", lambda: chat(top_p=0.9))
case("Responses", lambda: c.responses.create(model="policy", input="20+21="))
""",
)
CLIENTS["litellm"] = (
    "litellm",
    "litellm mcp",
    """
import litellm
ask = lambda **k: litellm.completion(**dict(model="openai/policy", messages=TOLD, max_tokens=100) | k)
case("chat", lambda: ask().choices[0].message.content is not None)
case("stream", lambda: list(ask(stream=True)))
case("tools", lambda: ask(tools=TOOLS, tool_choice="required").choices[0].message.tool_calls[0])
form = dict(type="json_schema", json_schema=dict(name="x", schema=SMALL))
case("json_schema", lambda: json.loads(ask(response_format=form).choices[0].message.content))
text = dict(model="text-completion-openai/policy", prompt=["1+1=", "2+2="])
case("text", lambda: litellm.text_completion(max_tokens=5, **text))
case("hosted_vllm", lambda: ask(model="hosted_vllm/policy", api_base=URL, api_key=KEY))
def too_long():
    try:
        ask(messages=[dict(role="user", content="9" * 100_000)])
    except litellm.ContextWindowExceededError:
        return True
case("ContextWindowExceededError", too_long)
""",
)
CLIENTS["langchain"] = (
    "langchain-openai",
    "langchain-openai langchain",
    """
import pydantic
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI, OpenAI
class Small(pydantic.BaseModel):
    "A bit."
    n: bool
def flip(n: bool) -> str:
    "Flips."
    return str(not n)
m = ChatOpenAI(model="policy", max_tokens=600, use_responses_api=False)
case("invoke", lambda: m.invoke("20+21="))
case("stream", lambda: list(m.stream("20+21=")))
case("batch", lambda: m.batch(["1+1=", "2+2="]))
case("bind_tools", lambda: m.bind_tools([flip]).invoke("20+21="))
case("tool_choice=any", lambda: m.bind_tools([flip], tool_choice="any").invoke("20+21=").tool_calls[0])
for method in ("function_calling", "json_schema"):
    formed = m.with_structured_output(Small, method=method)
    case(f"with_structured_output {method}", lambda: formed.invoke("20+21="))
case("top_logprobs", lambda: m.bind(logprobs=True, top_logprobs=3).invoke("20+21="))
case("create_agent", lambda: create_agent(m, [flip]).invoke(dict(messages=TOLD)))
case("OpenAI (completions)", lambda: OpenAI(model="policy", max_tokens=5).invoke("20+21="))
""",
)
CLIENTS["openai-agents"] = (
    "openai-agents",
    "openai-agents",
    """
import openai, pydantic
import agents
agents.set_tracing_disabled(True)
class Small(pydantic.BaseModel):
    n: bool
@agents.function_tool
def flip(n: bool) -> str:
    "Flips."
    return str(not n)
model = agents.OpenAIChatCompletionsModel("policy", openai.AsyncOpenAI())
limit = dict(max_tokens=600)
def agent(**k):
    settings = agents.ModelSettings(**limit | k.pop("settings", {}))
    return agents.Agent(name="a", model=model, model_settings=settings, **k)
run = lambda a: agents.Runner.run_sync(a, "20+21=", max_turns=3)
case("run", lambda: run(agent(instructions="Add.")))
case("tools", lambda: run(agent(tools=[flip])))
forced = dict(tools=[flip], tool_use_behavior="stop_on_first_tool", settings=dict(tool_choice="required"))
case("tool_choice", lambda: run(agent(**forced)))
case("output_type", lambda: run(agent(output_type=Small)).final_output.n in (True, False))
case("handoff", lambda: run(agent(handoffs=[agent(handoff_description="b")])))
default = agents.Agent(name="a", model="policy")
case("the default model class (Responses)", lambda: agents.Runner.run_sync(default, "20+21="))
""",
)
CLIENTS["smolagents"] = (
    "smolagents",
    "smolagents[openai]",
    """
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool
@tool
def flip(n: bool) -> str:
    '''Flips.

    Args:
        n: a bit
    '''
    return str(not n)
m = OpenAIServerModel(model_id="policy", max_tokens=600)
case("model", lambda: m([dict(role="user", content="20+21=")]))
case("ToolCallingAgent", lambda: ToolCallingAgent(tools=[flip], model=m, max_steps=1, verbosity_level=0).run("20+21="))
case("CodeAgent", lambda: CodeAgent(tools=[], model=m, max_steps=1, verbosity_level=0).run("20+21="))
structured = dict(model=m, max_steps=1, verbosity_level=0, use_structured_outputs_internally=True)
case("CodeAgent, structured", lambda: CodeAgent(tools=[], **structured).run("20+21="))
""",
)
CLIENTS["pydantic-ai"] = (
    "pydantic-ai-slim",
    "pydantic-ai-slim[openai]",
    """
import pydantic
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
class Small(pydantic.BaseModel):
    n: bool
model = OpenAIChatModel("policy")
def agent(**k):
    return Agent(model, model_settings=dict(max_tokens=600), **k)
case("run", lambda: agent().run_sync("20+21=").output is not None)
case("output_type", lambda: agent(output_type=Small).run_sync("20+21=").output.n in (True, False))
case("ToolOutput or text", lambda: agent(output_type=[ToolOutput(Small), str]).run_sync("20+21="))
case("NativeOutput", lambda: agent(output_type=NativeOutput(Small)).run_sync("20+21="))
async def stream():
    async with agent().run_stream("20+21=") as result:
        return [x async for x in result.stream_text()] is not None
case("run_stream", stream)
""",
)
CLIENTS["instructor"] = (
    "instructor",
    "instructor",
    """
import instructor, openai, pydantic
class Small(pydantic.BaseModel):
    n: bool
for mode in ("TOOLS", "JSON_SCHEMA"):
    client = instructor.from_openai(openai.OpenAI(), mode=getattr(instructor.Mode, mode))
    asked = dict(model="policy", messages=TOLD, response_model=Small, max_retries=0, max_tokens=600)
    case(mode, lambda: client.chat.completions.create(**asked))
""",
)
CLIENTS["inspect_ai"] = (
    "inspect_ai",
    "inspect_ai openai",
    """
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import choice, includes
from inspect_ai.solver import generate, multiple_choice, use_tools
from inspect_ai.tool import tool
@tool
def flip():
    async def execute(n: bool):
        '''Flips.

        Args:
            n: a bit
        '''
        return str(not n)
    return execute
m = get_model("openai-api/onecurve/policy", base_url=URL, api_key=KEY)
def run(solver, scorer=includes(), epochs=1, **k):
    samples = [Sample(input="20+21=", target="A", choices=["1", "2"])]
    config = GenerateConfig(**dict(max_tokens=30, max_retries=0) | k)
    task = Task(dataset=samples, solver=solver, scorer=scorer, config=config)
    (log,) = eval(task, model=m, epochs=epochs, display="none", log_dir="inspect_logs", message_limit=4)
    assert log.status == "success", log.error.message
    return log
case("generate", lambda: run([generate()]))
case("tools", lambda: run([use_tools(flip()), generate()]))
case("tool_choice=any", lambda: run([use_tools(flip(), tool_choice="any"), generate()]))
case("multiple_choice", lambda: run([multiple_choice()], choice()))
case("top_logprobs", lambda: run([generate()], logprobs=True, top_logprobs=3, num_choices=2))
texts = lambda log: {s.output.completion for s in log.samples}
case("epochs differ", lambda: len(texts(run([generate()], epochs=5, temperature=2.0))) > 1)
""",
)
CLIENTS["lm-eval"] = (
    "lm_eval",
    "lm_eval[api] transformers>=5",
    """
from lm_eval.api.instance import Instance
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
def model(kind, route, **k):
    return kind(base_url=URL + route, model="policy", tokenizer=MODEL, max_retries=1, **k)
def requests(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]
def likelihoods(batch_size):
    m = model(LocalCompletionsAPI, "/completions", batch_size=batch_size)
    return m.loglikelihood(requests("loglikelihood", *[(f"{i}+1=", f"{i + 1}") for i in range(10, 20)]))
m = model(LocalCompletionsAPI, "/completions")
until = dict(until=["x"], max_gen_toks=8, temperature=0)
case("generate_until, completions", lambda: m.generate_until(requests("generate_until", ("20+21=", until))))
case("loglikelihood", lambda: likelihoods(1))
case("loglikelihood, the same bits in batches of 1 and 5", lambda: likelihoods(1) == likelihoods(5))
case("loglikelihood_rolling", lambda: m.loglikelihood_rolling(requests("loglikelihood_rolling", ("20+21=41",))))
chat = model(LocalChatCompletion, "/chat/completions")
told = JsonChatStr(json.dumps(TOLD))
case("generate_until, chat", lambda: chat.generate_until(requests("generate_until", (told, until))))
""",
)
CLIENTS["verifiers"] = (
    "verifiers",
    "verifiers==0.1.14",
    """
import datasets, openai, verifiers as vf
from verifiers.clients import OpenAIChatCompletionsClient
data = datasets.Dataset.from_list([dict(question=f"12{i}+245=", answer="41") for i in range(2)])
def flip(n: bool) -> str:
    "Flips."
    return str(not n)
rubric = vf.Rubric(funcs=[lambda completion, **_: float(len(completion))])
rubric.funcs[0].__name__ = "length"
def run(env, n=1, **sampling):
    client, sampling = OpenAIChatCompletionsClient(openai.AsyncOpenAI()), dict(max_tokens=20) | sampling
    out = env.evaluate_sync(client, "policy", sampling, num_examples=2, rollouts_per_example=n)
    errors = [o["error"] for o in out["outputs"] if o.get("error")]
    assert not errors, errors[0]
    return out["outputs"]
single = vf.SingleTurnEnv(dataset=data, rubric=rubric)
tool = vf.ToolEnv(dataset=data, rubric=rubric, tools=[flip], max_turns=2)
case("SingleTurnEnv", lambda: run(single))
case("ToolEnv", lambda: run(tool))
case("logprobs", lambda: run(single, logprobs=True))
texts = lambda outputs: {json.dumps(o["completion"], default=str) for o in outputs}
case("rollouts differ", lambda: len(texts(run(single, 4, temperature=2.0))) > 2)
case("top_p", lambda: run(single, top_p=0.9))
""",
)


def run_client(name, folder, address, model):
    """[version, what works, what is refused] of a client."""
    package, requirements, code = CLIENTS[name]
    python = folder / name / "bin/python"
    if not python.exists():
        subprocess.run(["uv", "venv", "-q", folder / name, "--python=3.11"], check=True)
        subprocess.run(["uv", "pip", "install", "-q", f"--python={python}", *requirements.split()], check=True)
    env = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    env |= dict(OPENAI_BASE_URL=address, OPENAI_API_KEY=KEY, MODEL=str(model), HF_HUB_OFFLINE="1")
    script = HEAD + f"PACKAGE = {package!r}\n" + code + TAIL
    path = folder / f"ask_{name}.py"  # a file, as some look at their own source
    path.write_text(script)
    done = subprocess.run([python, path], env=env, cwd=folder, text=True, capture_output=True, timeout=900)
    print(done.stderr[-2000:], file=sys.stderr)
    results = re.findall("^RESULT(.*)$", done.stdout, re.MULTILINE)
    return json.loads(results[0]) if results else ["?", [], [done.stderr.strip().splitlines()[-1]]]


def main(model, *names):
    folder = Path(os.environ.get("CLIENTS", Path(tempfile.gettempdir(), "onecurve_clients")))
    copied = folder / "model"  # with more positions than it was made with: prompts of frameworks are long
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(model, copied, ignore=shutil.ignore_patterns("optimizer", "flight"))
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | dict(max_position_embeddings=32768)))
    command = ["tools/serve.py", f"--init_from={copied}", "--tool_call_parser=pythonic", "--port=0"]
    options = dict(cwd=ROOT, env=os.environ | dict(ONECURVE_API_KEY=KEY), stdout=subprocess.PIPE, text=True)
    server = subprocess.Popen([sys.executable, *command], **options)
    try:
        line = next(line for line in server.stdout if line.startswith("serving"))
        address = re.search(r"at (\S+),", line)[1]
        print("| client | version | works | fails | date |\n|---|---|---|---|---|", flush=True)
        for name in names or CLIENTS:
            version, works, refused = run_client(name, folder, address, copied)
            day = time.strftime("%Y-%m-%d")
            print(f"| {name} | {version} | {'; '.join(works)} | {'; '.join(refused)} | {day} |", flush=True)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
