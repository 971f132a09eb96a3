"""Where a schema that nothing satisfies contradicts itself: the place to name in the refusal. A guess that is nearly always right."""

from trunkline.grammar.algebra.nodes import Conjunction, Nodes
from trunkline.grammar.interface import Finding
from trunkline.grammar.schema.forms import ANY, NEVER, Arrays, Form, Name, Objects

REASON = "nothing satisfies the schema"

# If several of these are at the place, the first is the one to look at.
LIKELY = (
    *("enum", "const", "minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum", "multipleOf"),
    *("contains", "pattern", "required", "not", "oneOf", "allOf", "anyOf", "if"),
    *("propertyNames", "prefixItems", "items", "type"),
)


def blame(
    nodes: Nodes,
    root: Conjunction,
    names: dict[Conjunction, Name],
    definitions: dict[Name, tuple[Form, ...]],
) -> Finding:
    """From the root down through what it needs and can't have."""
    conjunction_of = {name: conjunction for conjunction, name in names.items()}
    name, seen = names.get(root, NEVER), set[Name]()
    while name in definitions and name not in seen:
        seen.add(name)
        needed = next((need for form in definitions[name] if (need := _first_need(form, definitions, seen))), None)
        if needed is None:
            break
        name = needed
    numbers = [number for number, _ in sorted(conjunction_of.get(name, root)) if number >= 0]
    for keyword in LIKELY:
        for number in numbers:
            if keyword in nodes.content(number):
                return Finding(nodes.where(number), keyword, REASON)
    return Finding("", "type", REASON)


def _first_need(form: Form, definitions: dict[Name, tuple[Form, ...]], seen: set[Name]) -> Name | None:
    """A part without which the form has no value, and that has none as it stands, or leads on."""
    needs: list[Name] = []
    if isinstance(form, Objects):
        needs = [under for name, under in form.properties if name in form.required]
    elif isinstance(form, Arrays):
        needs = [*form.prefix[: form.min_items], *(one.item for one in form.contains if one.least)]
        needs += [form.rest] if form.min_items > len(form.prefix) else []
    needs = [need for need in needs if need not in (ANY, NEVER)]
    empty = next((need for need in needs if not definitions[need]), None)
    return empty or next((need for need in needs if need not in seen and _is_compound(definitions[need])), None)


def _is_compound(alternatives: tuple[Form, ...]) -> bool:
    return all(isinstance(form, Arrays | Objects) for form in alternatives)
