"""The mix: of six users three ask a RAG application, one chats, one wants JSON, one has tools called.

    locust -f loadtests/locustfile.py --headless --host http://127.0.0.1:8000 --users 6 --run-time 60s
    locust -f loadtests/locustfile.py RagUser ChatUser      # these kinds only

The shares are each class's `weight`.
"""

from loadtests.chat_user import ChatUser
from loadtests.rag_user import RagUser
from loadtests.schema_user import SchemaUser
from loadtests.tool_user import ToolUser

__all__ = ["ChatUser", "RagUser", "SchemaUser", "ToolUser"]
