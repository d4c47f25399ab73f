"""The worker service: one persistent process per device that pulls units, embeds them and publishes the results."""
