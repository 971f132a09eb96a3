"""RAG users: many people, a few applications. Each application opens all its prompts with the same long system text."""

from locust import task

from loadtests.model_user import ModelUser, text

SYSTEM_WORDS = 400
DOCUMENT_WORDS = 100
NUM_DOCUMENTS = 8  # of each application
QUESTION_WORDS = 15


class RagUser(ModelUser):
    """Asks one application after another about one of its documents, and now and then asks on."""

    kind = "rag"
    weight = 3

    @task(4)
    def ask_once(self) -> None:
        self.converse(turns=1)

    @task(1)
    def ask_twice(self) -> None:
        self.converse(turns=2)

    def converse(self, turns: int) -> None:
        application = self.application()
        document = text(f"document {application}.{self.rng.randrange(NUM_DOCUMENTS)}", DOCUMENT_WORDS)
        messages = [{"role": "system", "content": text(f"system {application}", SYSTEM_WORDS)}]
        for turn in range(turns):
            question = self.question(QUESTION_WORDS)
            messages.append({"role": "user", "content": question if turn else f"{document}\n\n{question}"})
            if (answer := self.ask(messages)) is None:
                return
            messages.append({"role": "assistant", "content": answer.text})
