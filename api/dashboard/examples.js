// What the playground's boxes hold at first.

export const SCHEMA = {
  type: "object",
  properties: {
    topic: { enum: ["hours", "returns", "other"] },
    open_on_sunday: { type: "boolean" },
    confidence: { type: "integer", minimum: 0, maximum: 10 },
  },
  required: ["topic", "open_on_sunday", "confidence"],
  additionalProperties: false,
};

export const TOOLS = [
  {
    type: "function",
    function: {
      name: "opening_hours",
      description: "When the shop is open on a day of the week.",
      parameters: {
        type: "object",
        properties: { day: { enum: ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"] } },
        required: ["day"],
        additionalProperties: false,
      },
    },
  },
];
