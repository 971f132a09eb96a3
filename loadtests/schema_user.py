"""JSON users: every answer must follow a JSON schema; one that doesn't is a failure."""

from locust import task

from loadtests.answer import Answer
from loadtests.model_user import ModelUser, text
from loadtests.schemas import MAX_TOKENS, SCHEMAS, objection

INSTRUCTION_WORDS = 120
MESSAGE_WORDS = (20, 60)  # from, to


class SchemaUser(ModelUser):
    """Has one message after another turned into an object."""

    kind = "json"
    weight = 1

    @task
    def extract(self) -> None:
        name = self.rng.choice(sorted(SCHEMAS))
        wanted = SCHEMAS[name]

        def check(answer: Answer) -> str | None:
            return objection(answer.text, wanted)

        self.ask(
            [
                {"role": "system", "content": text(f"instruction {name}", INSTRUCTION_WORDS)},
                {"role": "user", "content": self.question(self.rng.randint(*MESSAGE_WORDS))},
            ],
            check=check,
            max_tokens=MAX_TOKENS,
            response_format={"type": "json_schema", "json_schema": {"name": name, "schema": wanted, "strict": True}},
        )
